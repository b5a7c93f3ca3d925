"""The op `block_copy`: copies whole blocks of the paged cache over others, in place."""
