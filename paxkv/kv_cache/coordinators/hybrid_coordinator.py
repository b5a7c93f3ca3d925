"""HybridKVCacheCoordinator: finds prefix hits that are valid in groups of several kinds."""

import dataclasses
import math
from collections.abc import Iterable, Sequence

from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from paxkv.kv_cache.coordinators.coordinator import GroupBlocks, KVCacheCoordinator
from paxkv.kv_cache.hashing.block_hash import BlockHash, with_block_size
from paxkv.kv_cache.managers.single_type_manager import SingleTypeKVCacheManager
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EqualGroups:
    """KV cache groups with equal specs. A prefix is a hit in all of them or in none."""

    kv_cache_spec: KVCacheSpec
    manager_class: type[SingleTypeKVCacheManager]
    block_size: int  # tokens, on all ranks together
    group_ids: tuple[int, ...]


class HybridKVCacheCoordinator(KVCacheCoordinator):
    """For several groups, with prefix caching."""

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        *,
        enable_caching: bool,
        use_eagle: bool = False,
        observers: Iterable[BlockPoolObserver] = (),
    ) -> None:
        super().__init__(
            kv_cache_config,
            enable_caching=enable_caching,
            use_eagle=use_eagle,
            observers=observers,
        )
        self.equal_groups = self._merge_equal_groups()
        # A hit must end at the end of a block in every group.
        self.lcm_block_size = math.lcm(*(groups.block_size for groups in self.equal_groups))

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int
    ) -> tuple[GroupBlocks, int]:
        """See the base class.

        Each kind of group in turn shortens the hit to the longest length that it accepts, until
        all kinds have accepted the same length. One round is not enough: a sliding window accepts
        a length if it has the blocks before its end, and it may have to reject a shorter length.
        """
        hit_blocks, num_tokens = self._agree(self.equal_groups, block_hashes, max_cache_hit_length)
        return tuple(hit_blocks[i] for i in range(len(self.single_type_managers))), num_tokens

    def find_state_to_save(
        self, block_hashes: Sequence[BlockHash], max_cache_hit_length: int, num_hit_tokens: int
    ) -> int:
        of_tokens = [groups for groups in self.equal_groups if groups.manager_class.holds_tokens]
        if len(of_tokens) in (0, len(self.equal_groups)):
            return 0
        _, num_tokens = self._agree(of_tokens, block_hashes, max_cache_hit_length)
        return num_tokens if num_tokens > num_hit_tokens else 0

    def _agree(
        self,
        equal_groups: Sequence[EqualGroups],
        block_hashes: Sequence[BlockHash],
        max_cache_hit_length: int,
    ) -> tuple[dict[int, list[KVCacheBlock]], int]:
        """The longest hit that all of these groups accept: its blocks, by group id, and length."""
        hit_blocks: dict[int, list[KVCacheBlock]] = {}
        num_tokens = max_cache_hit_length
        num_accepted = 0
        while num_accepted < len(equal_groups):
            for groups in equal_groups:
                num_before = num_tokens
                num_tokens = self._shorten_hit(
                    groups, block_hashes, num_before, max_cache_hit_length, hit_blocks
                )
                num_accepted = num_accepted + 1 if num_tokens == num_before else 1
                if num_accepted == len(equal_groups):
                    break
        return hit_blocks, num_tokens

    def _shorten_hit(
        self,
        groups: EqualGroups,
        block_hashes: Sequence[BlockHash],
        num_tokens: int,
        max_cache_hit_length: int,
        hit_blocks: dict[int, list[KVCacheBlock]],
    ) -> int:
        """Length of the longest hit of up to `num_tokens` tokens that these groups accept.

        Stores its blocks in `hit_blocks`, by group id.
        """
        block_size = groups.block_size
        is_full_attention = isinstance(groups.kv_cache_spec, FullAttentionSpec)
        if is_full_attention and groups.group_ids[0] in hit_blocks:
            # Every shorter prefix is a hit too. `num_tokens` is at most the length found here
            # before, and is a multiple of this block size.
            for group_id in groups.group_ids:
                del hit_blocks[group_id][num_tokens // block_size :]
            return num_tokens
        # With EAGLE, one more block must be cached, and is dropped again. Each kind searches for it
        # after the same length, so that only one block is dropped and not one per kind.
        num_dropped_tokens = block_size if self.use_eagle else 0
        found_blocks = groups.manager_class.find_longest_cache_hit(
            block_hashes=with_block_size(block_hashes, self.hash_block_size, block_size),
            max_length=min(num_tokens + num_dropped_tokens, max_cache_hit_length),
            kv_cache_group_ids=groups.group_ids,
            block_pool=self.block_pool,
            kv_cache_spec=groups.kv_cache_spec,
            use_eagle=self.use_eagle,
            alignment_tokens=self.lcm_block_size,
        )
        hit_blocks.update(zip(groups.group_ids, found_blocks, strict=True))
        return len(found_blocks[0]) * block_size

    def _merge_equal_groups(self) -> tuple[EqualGroups, ...]:
        equal_groups = [
            EqualGroups(
                kv_cache_spec=spec,
                manager_class=type(managers[0]),
                block_size=managers[0].block_size,
                group_ids=tuple(manager.kv_cache_group_id for manager in managers),
            )
            for spec, managers in self.managers_by_spec.items()
        ]
        # Full attention comes first: its search stops at the first miss, so its result limits the
        # searches of the other kinds, and it never has to search again. States come last, because
        # few positions have one.
        return tuple(
            sorted(
                equal_groups,
                key=lambda groups: (
                    not groups.manager_class.holds_tokens,
                    not isinstance(groups.kv_cache_spec, FullAttentionSpec),
                ),
            )
        )
