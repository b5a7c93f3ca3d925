"""The state space of Mamba, with one decay per channel and number of the state."""
