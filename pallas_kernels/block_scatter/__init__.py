"""The op `block_scatter`: writes blocks that `block_gather` took out back into the cache."""
