"""SlidingWindowManager: a token attends to the last tokens before it; earlier ones are freed."""

from paxkv.contracts.kv_cache_spec import KVCacheSpec, SlidingWindowSpec
from paxkv.kv_cache.managers.windowed_manager import WindowedManager


class SlidingWindowManager(WindowedManager):
    """Block tables of sliding window layers.

    A hit needs the last `ceil((sliding_window - 1) / block_size)` blocks before its end, or all
    blocks if it is shorter.
    """

    kv_cache_spec: SlidingWindowSpec

    @classmethod
    def num_skipped_tokens(cls, kv_cache_spec: KVCacheSpec, num_computed_tokens: int) -> int:
        # Window 4, 7 computed: the token at 7 sees 4, 5, 6 and itself, so 0..3 are skipped.
        assert isinstance(kv_cache_spec, SlidingWindowSpec)
        return max(num_computed_tokens - kv_cache_spec.sliding_window + 1, 0)

    def get_num_tokens_skipping(self, num_blocks: int) -> int:
        return num_blocks * self.block_size + self.kv_cache_spec.sliding_window - 1
