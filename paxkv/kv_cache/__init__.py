"""Host side of the paged KV cache: which blocks of memory hold which request's tokens."""
