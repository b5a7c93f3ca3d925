"""Settings, sampling parameters and their defaults, and command-line flags."""
