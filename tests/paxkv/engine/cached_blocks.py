"""Requests that are cached in a block pool and freed, for tests of KV events."""

import types

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, SlidingWindowSpec

_FIELDS = {"block_size": 2, "num_kv_heads": 1, "head_size": 8, "dtype": "float32"}
# The specs of the groups to which these blocks can belong.
SPECS = (FullAttentionSpec(**_FIELDS), SlidingWindowSpec(**_FIELDS, sliding_window=6))


def run_request(pool, hasher, token_ids, group_id=0):
    """Allocates, caches and frees the full blocks of a request, each of two tokens."""
    block_hashes = []
    hasher.extend(block_hashes, token_ids)
    blocks = pool.get_new_blocks(len(block_hashes))
    pool.cache_full_blocks(
        request=types.SimpleNamespace(
            all_token_ids=token_ids, block_hashes=block_hashes, lora_name=None
        ),
        blocks=blocks,
        num_cached_blocks=0,
        num_full_blocks=len(blocks),
        block_size=2,
        kv_cache_group_id=group_id,
    )
    pool.free_blocks(reversed(blocks))
