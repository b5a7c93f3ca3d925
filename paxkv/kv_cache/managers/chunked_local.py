"""ChunkedLocalAttentionManager: a token attends within its chunk; earlier chunks are freed."""

from paxkv.contracts.kv_cache_spec import ChunkedLocalAttentionSpec, KVCacheSpec, cdiv
from paxkv.kv_cache.managers.windowed_manager import WindowedManager


class ChunkedLocalAttentionManager(WindowedManager):
    """Block tables of chunked local attention layers.

    A hit needs the blocks of the chunk that contains its end, and no blocks if it ends exactly at
    the start of a chunk.
    """

    kv_cache_spec: ChunkedLocalAttentionSpec

    @classmethod
    def num_skipped_tokens(cls, kv_cache_spec: KVCacheSpec, num_computed_tokens: int) -> int:
        # Chunks of 8, 13 computed: the token at 13 sees 8..13, so 0..7 are skipped.
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        chunk_size = kv_cache_spec.attention_chunk_size
        return num_computed_tokens // chunk_size * chunk_size

    def get_num_tokens_skipping(self, num_blocks: int) -> int:
        chunk_size = self.kv_cache_spec.attention_chunk_size
        return cdiv(num_blocks * self.block_size, chunk_size) * chunk_size
