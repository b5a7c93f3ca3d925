"""Small specs, requests and managers for the tests of the KV cache."""

from paxkv.contracts.kv_cache_spec import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from paxkv.kv_cache.hashing.block_hash import BlockHasher
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.pool.block_pool import BlockPool

BLOCK_SIZE = 4
HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": "float32"}


def full(block_size=BLOCK_SIZE):
    return FullAttentionSpec(block_size=block_size, **HEADS)


def window(sliding_window, block_size=BLOCK_SIZE):
    return SlidingWindowSpec(block_size=block_size, sliding_window=sliding_window, **HEADS)


def chunked(chunk_size, block_size=BLOCK_SIZE):
    return ChunkedLocalAttentionSpec(
        block_size=block_size, attention_chunk_size=chunk_size, **HEADS
    )


def states(num_parts=1, blocks_per_state=3, block_size=BLOCK_SIZE):
    page_bytes = full().page_size_bytes
    return MambaSpec(
        block_size=block_size,
        page_bytes=page_bytes,
        state_bytes=blocks_per_state * page_bytes - 4,
        blocks_per_state=blocks_per_state,
        num_parts=num_parts,
    )


def cross(block_size=BLOCK_SIZE, max_encoder_tokens=64):
    return CrossAttentionSpec(block_size=block_size, max_encoder_tokens=max_encoder_tokens, **HEADS)


def sinks(sink_len, block_size=BLOCK_SIZE):
    return SinkFullAttentionSpec(block_size=block_size, sink_len=sink_len, **HEADS)


class FakeRequest:
    """A `CacheRequest` that a test changes by hand."""

    def __init__(
        self,
        request_id,
        token_ids,
        *,
        salt=None,
        skip_reading_prefix_cache=False,
        hash_block_size=BLOCK_SIZE,
    ):
        self.request_id = request_id
        self.all_token_ids = list(token_ids)
        self.lora_name = None
        self.cache_salt = salt
        self.num_computed_tokens = 0
        self.num_prompt_tokens = len(self.all_token_ids)
        self.num_preemptions = 0
        self.state_save_at = 0
        self.num_leading_tokens = 0
        self.keeps_state_for_forks = False
        self.skip_reading_prefix_cache = skip_reading_prefix_cache
        self.hash_block_size = hash_block_size

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    @property
    def block_hashes(self):
        hashes = []
        hasher = BlockHasher(block_size=self.hash_block_size, seed="test")
        hasher.extend(hashes, self.all_token_ids, ExtraKeySources(cache_salt=self.cache_salt))
        return hashes


def make_config(*specs, num_blocks=20, hash_block_size=None):
    groups = tuple(
        KVCacheGroupSpec(layer_names=(f"layer{i}",), kv_cache_spec=spec)
        for i, spec in enumerate(specs)
    )
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_groups=groups, hash_block_size=hash_block_size
    )


def make_manager(*specs, num_blocks=20, max_model_len=64, hash_block_size=None, **settings):
    """A KVCacheManager with one group per spec; without specs, one group of full attention."""
    return KVCacheManager(
        kv_cache_config=make_config(
            *(specs or (full(),)), num_blocks=num_blocks, hash_block_size=hash_block_size
        ),
        max_model_len=max_model_len,
        **settings,
    )


def make_group(manager_class, spec, *, num_blocks=20, enable_caching=True, **settings):
    """One group's manager with its own pool."""
    pool = BlockPool(num_blocks=num_blocks, enable_caching=enable_caching)
    return manager_class(kv_cache_spec=spec, block_pool=pool, kv_cache_group_id=0, **settings)


def admit(manager, request, num_new_tokens=None, **arguments):
    """Looks up the prefix and allocates, as at admission; True if there was room."""
    hits, num_hits = manager.get_computed_blocks(request)
    num_new_tokens = num_new_tokens or request.num_tokens - num_hits
    if manager.allocate_slots(request, num_new_tokens, num_hits, hits, **arguments) is None:
        return False
    request.num_computed_tokens = num_hits
    return True


def finish_step(request, num_tokens=None):
    request.num_computed_tokens = num_tokens or request.num_tokens


def run_alone(manager, request_id, token_ids, **settings):
    """A request whose tokens are all computed. It still holds its blocks."""
    request = FakeRequest(request_id, token_ids, **settings)
    assert admit(manager, request)
    finish_step(request)
    manager.drain_block_copies()
    manager.finish_step()
    return request


def fork(manager, source, request_id, num_tokens, token_ids=None, **arguments):
    """A request that shares the source's first `num_tokens` tokens; one more is computed."""
    if token_ids is None:
        token_ids = [*source.all_token_ids[:num_tokens], 99]
    request = FakeRequest(request_id, token_ids)
    blocks = manager.get_forked_blocks(source, num_tokens)
    assert blocks is not None
    num_new = request.num_tokens - num_tokens
    if manager.allocate_slots(request, num_new, num_tokens, blocks, **arguments) is None:
        return None
    request.num_computed_tokens = num_tokens
    return request


def copies(manager):
    return [(c.source_block_id, c.target_block_id) for c in manager.drain_block_copies()]


def ids(blocks):
    """Physical ids of one group's blocks."""
    return [block.block_id for block in blocks]


def table(manager, request, group=0):
    return manager.get_block_ids(request.request_id)[group]


def state(manager):
    """Everything that a failed allocation must not change."""
    pool = manager.block_pool
    return (
        ids(pool.free_block_queue.get_all_free_blocks()),
        [(block.ref_cnt, block.block_hash) for block in pool.blocks],
        [
            (
                dict(m.num_cached_blocks),
                dict(m.num_skipped_blocks),
                m.num_held_blocks,
                {r: ids(b) for r, b in m.req_to_blocks.items()},
            )
            for m in manager.coordinator.single_type_managers
        ],
        str(manager.prefix_cache_stats),
    )


def count_slots_block_by_block(manager, requests):
    """Like `count_slots`, by visiting every block and position, in O(tokens)."""
    num_allocated = num_used = 0
    for group, group_manager in enumerate(manager.coordinator.single_type_managers):
        if not group_manager.holds_tokens:
            continue
        block_size = group_manager.block_size
        used = {}
        for request in requests:
            for i, block_id in enumerate(manager.get_block_ids(request.request_id)[group]):
                num_tokens = min(max(request.num_computed_tokens - i * block_size, 0), block_size)
                if block_id != 0:
                    used[block_id] = max(used.get(block_id, 0), num_tokens)
        num_allocated += len(used) * block_size
        num_used += sum(used.values())
    return num_allocated, num_used
