"""The op `block_gather`: copies blocks out of the paged cache into arrays of their own."""
