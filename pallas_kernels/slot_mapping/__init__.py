"""The op `slot_mapping`: the cache slot that each token is written to."""
