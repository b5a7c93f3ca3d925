"""SinkFullAttentionManager: full attention with sinks, which are learned keys and values."""

from collections.abc import Sequence

from paxkv.contracts.kv_cache_spec import SinkFullAttentionSpec
from paxkv.errors import ConfigError
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.managers.full_attention import FullAttentionManager
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class SinkFullAttentionManager(FullAttentionManager):
    """Block tables of full attention layers with sinks.

    The sinks' blocks are allocated once and never freed. They are not in any request's table, so
    a token's position gives its block as in other groups. The runner must put `sink_blocks` in
    front of the device's tables and add `sink_len` positions.

    Raises:
        ConfigError: `sink_len` is not a positive multiple of the block size. A request's first
            token must begin a block.
    """

    def __init__(
        self,
        *,
        kv_cache_spec: SinkFullAttentionSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        device_block_work: DeviceBlockWork | None = None,
    ) -> None:
        super().__init__(
            kv_cache_spec=kv_cache_spec,
            block_pool=block_pool,
            kv_cache_group_id=kv_cache_group_id,
            device_block_work=device_block_work,
        )
        sink_len = kv_cache_spec.sink_len
        if sink_len < 1 or sink_len % self.block_size:
            raise ConfigError(
                f"{sink_len=} must be a positive multiple of the {self.block_size} tokens of a "
                "KV cache block. Choose a block size that divides it."
            )
        self.sink_blocks = block_pool.allocate_permanent_blocks(sink_len // self.block_size)

    def get_permanent_blocks(self) -> Sequence[KVCacheBlock]:
        return self.sink_blocks
