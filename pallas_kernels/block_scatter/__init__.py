"""The op `block_scatter`: writes blocks from `block_gather` back into the cache."""
