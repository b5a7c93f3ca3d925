"""What goes into a model's step, from layer to layer, and out of it."""
