"""The op `kv_scatter`: writes new keys and values into the paged cache, in place."""
