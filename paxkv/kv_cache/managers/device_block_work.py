"""DeviceBlockWork: collects blocks that the device must copy before a step's writes."""

from paxkv.contracts.scheduler_output import BlockCopy
from paxkv.kv_cache.pool.block import KVCacheBlock


class DeviceBlockWork:
    """Collects block copies while a step is decided."""

    def __init__(self) -> None:
        # Target id -> (source, target). Copies read the content from before the step.
        self._copies: dict[int, tuple[KVCacheBlock, KVCacheBlock]] = {}

    def record_copy(self, source: KVCacheBlock, target: KVCacheBlock) -> None:
        """Records that the newly allocated `target` must start with the content of `source`."""
        # The device does all copies at once. If `source` is itself the target of a copy, the
        # original source is copied instead: 5 -> 7, 7 -> 9 becomes 5 -> 7, 5 -> 9.
        if source.block_id in self._copies:
            source = self._copies[source.block_id][0]
        self._copies[target.block_id] = (source, target)

    def drop_freed_targets(self) -> None:
        """Drops copies into blocks that have lost their holder: other requests may get them."""
        if self._copies:
            self._copies = {
                block_id: copy for block_id, copy in self._copies.items() if copy[1].ref_cnt > 0
            }

    def drain_copies(self) -> list[BlockCopy]:
        """Copies since the last call, each to a different target, to be done all at once."""
        if not self._copies:
            return []
        copies = [
            BlockCopy(source_block_id=source.block_id, target_block_id=target.block_id)
            for source, target in self._copies.values()
            if source is not target
        ]
        self._copies = {}
        return copies
