"""One token of the state space of Mamba, on states in the pages of a cache."""
