"""One token of the gated delta rule, on states in the pages of a cache."""
