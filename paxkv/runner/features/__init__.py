"""Step features: computations of a step besides that of the next tokens."""
