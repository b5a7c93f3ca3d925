"""One token of state space duality, on states in the pages of a cache."""
