"""Settings, sampling parameters and their defaults, and the flags made of them."""
