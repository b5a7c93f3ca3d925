"""A causal convolution of each channel, whose last inputs are carried from step to step."""
