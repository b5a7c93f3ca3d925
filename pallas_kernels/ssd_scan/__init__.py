"""The state space of Mamba2, with one decay per head."""
