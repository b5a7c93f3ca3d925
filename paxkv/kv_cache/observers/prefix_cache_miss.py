"""`PrefixCacheMissExplainer`: explains why a request did not find more in the prefix cache."""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from paxkv.contracts.observation import MissReason, PrefixCacheMiss
from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
    with_block_size,
)
from paxkv.kv_cache.pool.block_pool import BlockPool

MAX_ANSWERS = 1024
MAX_FIRST_BLOCKS = 4096
# Number of (salt, adapter) pairs that are remembered per first block of tokens.
_MAX_NAMES_PER_FIRST_BLOCK = 8
# A number of tokens that is larger than any window.
_FAR = 2**40


class PrefixGroup(NamedTuple):
    """The properties of a KV cache group on which prefix hits depend.

    Args:
        block_size: Tokens of a block.
        get_num_skipped_tokens: Leading tokens that the layers of the group no longer read after
            this many computed tokens. A hit needs no blocks of skipped tokens.
        kind: As in `KVCacheSpec.kind`.
        holds_tokens: Every full block is cached. Otherwise, single blocks are, which stand for
            states.
    """

    group_id: int
    block_size: int
    get_num_skipped_tokens: Callable[[int], int]
    kind: str = "full_attention"
    holds_tokens: bool = True


class _Lookup(NamedTuple):
    """The result of one look-up, from which `answer` later makes an explanation.

    Args:
        missing_key: Hash of the block that the hit lacked; None if no block was missing.
        num_evicted: `EvictedHashes.num_evicted` at the time of the look-up.
    """

    num_tokens: int
    num_hit_tokens: int
    reason: MissReason
    block_idx: int | None = None
    block_size: int | None = None
    kind: str | None = None
    missing_key: BlockHashWithGroupId | None = None
    num_evicted: int = 0


class _Missing(NamedTuple):
    """A block of a prompt that a group has not cached."""

    group: PrefixGroup
    block_idx: int

    @property
    def start(self) -> int:
        """Position of the block's first token."""
        return self.block_idx * self.group.block_size

    @property
    def end(self) -> int:
        """Position after the block's last token."""
        return self.start + self.group.block_size


class _FirstBlock(NamedTuple):
    """A first block that a request cached, with the salt and adapter that its hash covers."""

    block_hash: BlockHash
    cache_salt: str | None
    lora_name: str | None


class PrefixCacheMissExplainer:
    """Remembers the look-up of each admission, and explains it on request.

    Answers are for operators only, because they reveal facts about prompts of other requests that
    salts should keep separate.

    Recording a complete hit takes a few microseconds. Recording a miss looks up at most the blocks
    that the admission looked up. An answer searches the pool's memory of evicted hashes, which
    takes some hundred microseconds. Memory is bounded.

    Args:
        groups: The KV cache groups that take part in prefix hits. If several groups lack a block at
            the same place, the first of them is named.
        hash_block_size: Number of tokens that each of a request's `block_hashes` covers.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        groups: Sequence[PrefixGroup],
        hash_block_size: int,
    ) -> None:
        self._block_pool = block_pool
        self._groups = tuple(groups)
        self._hash_block_size = hash_block_size
        # A hit consists of whole blocks in every group.
        self._alignment = math.lcm(*(group.block_size for group in groups))
        # First blocks are compared in the group that keeps them longest: full attention, if the
        # model has such layers.
        self._first_block_group = min(
            self._groups, key=lambda group: group.get_num_skipped_tokens(_FAR)
        )
        self._lookups: OrderedDict[str, _Lookup] = OrderedDict()
        self._first_blocks: OrderedDict[tuple[int, ...], deque[_FirstBlock]] = OrderedDict()

    def record(self, request: CacheRequest, num_hit_tokens: int) -> None:
        """Records the result of an admission's look-up.

        Must be called before the request's own blocks are allocated and cached.
        """
        # A resumed request finds its own blocks, so the record of its first admission is kept.
        if request.num_preemptions > 0 and request.request_id in self._lookups:
            return
        self._lookups[request.request_id] = self._look_up(request, num_hit_tokens)
        self._lookups.move_to_end(request.request_id)
        if len(self._lookups) > MAX_ANSWERS:
            self._lookups.popitem(last=False)
        if num_hit_tokens == 0 and self._block_pool.enable_caching:
            self._remember_first_block(request)

    def answer(self, request_id: str) -> PrefixCacheMiss | None:
        """Explains an admission; None if it is not among the last `MAX_ANSWERS` admissions."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None else self._explain(request_id, lookup)

    def explain(self, request: CacheRequest, num_hit_tokens: int) -> PrefixCacheMiss:
        """Explains what a request that is not admitted yet would find now; records nothing."""
        return self._explain(request.request_id, self._look_up(request, num_hit_tokens))

    def _explain(self, request_id: str, lookup: _Lookup) -> PrefixCacheMiss:
        reason = lookup.reason
        if lookup.missing_key is not None and self._block_pool.evicted_hashes.contains(
            lookup.missing_key, before=lookup.num_evicted
        ):
            reason = "evicted"
        return PrefixCacheMiss(
            request_id=request_id,
            reason=reason,
            num_tokens=lookup.num_tokens,
            num_hit_tokens=lookup.num_hit_tokens,
            block_idx=lookup.block_idx,
            block_size=lookup.block_size,
            kind=lookup.kind,
        )

    def _look_up(self, request: CacheRequest, num_hit_tokens: int) -> _Lookup:
        num_tokens = request.num_tokens
        if not self._block_pool.enable_caching or request.skip_reading_prefix_cache:
            return _Lookup(num_tokens, num_hit_tokens, "disabled")
        # The last token must be computed, because its logits give the next one.
        if num_tokens - 1 < self._alignment:
            return _Lookup(num_tokens, num_hit_tokens, "too_short")
        if num_hit_tokens + self._alignment > num_tokens - 1:
            return _Lookup(num_tokens, num_hit_tokens, "hit")
        missing, is_known = self._find_missing(request, num_hit_tokens)
        if missing is None:
            return _Lookup(num_tokens, num_hit_tokens, "shortened")
        reason: MissReason = "shortened" if missing.group.holds_tokens else "state_not_saved"
        if not is_known:
            is_first = missing.block_idx == 0
            reason = self._first_block_reason(request) if is_first else "block_differs"
        block_hash = self._block_hash(request, missing.group, missing.block_idx)
        return _Lookup(
            num_tokens,
            num_hit_tokens,
            reason,
            missing.block_idx,
            missing.group.block_size,
            missing.group.kind,
            make_block_hash_with_group_id(block_hash, missing.group.group_id),
            self._block_pool.evicted_hashes.num_evicted,
        )

    def _find_missing(
        self, request: CacheRequest, num_hit_tokens: int
    ) -> tuple[_Missing | None, bool]:
        """Finds the missing block that prevents a longer hit.

        Returns:
            The block (None if every group has the blocks it needs), and whether another cached
            block proves that its tokens were cached once.
        """
        limit = (request.num_tokens - 1) // self._alignment * self._alignment
        gaps = [self._first_gap(request, group, num_hit_tokens) for group in self._groups]
        known = max(gaps, key=lambda gap: gap.start)
        # A group that skips no token needs every block, so its gap bounds every hit.
        bounds = [gap for gap in gaps if gap.group.get_num_skipped_tokens(limit) == 0]
        if bounds:
            first = min(bounds, key=lambda gap: gap.start)
            limit = min(limit, first.start // self._alignment * self._alignment)
            if limit <= num_hit_tokens:
                lacking = first if first.end <= known.start else known
                return lacking, self._is_known(request, lacking.end)
        for end in range(limit, num_hit_tokens, -self._alignment):
            # Without full attention, only a cached last block shows that this prefix is known.
            if bounds or any(
                self._is_cached(request, g, end // g.block_size - 1) for g in self._groups
            ):
                return self._gap_of_run(request, end), True
        return known, self._is_known(request, known.end)

    def _is_known(self, request: CacheRequest, num_tokens: int) -> bool:
        """Whether a group has cached the block that holds the last of `num_tokens` tokens."""
        return any(
            self._is_cached(request, group, (num_tokens - 1) // group.block_size)
            for group in self._groups
            if -(-num_tokens // group.block_size) * group.block_size <= request.num_tokens
        )

    def _first_gap(self, request: CacheRequest, group: PrefixGroup, num_tokens: int) -> _Missing:
        """The first block after `num_tokens` tokens that the group has not cached.

        It may be the block after the last full one.
        """
        block_idx = num_tokens // group.block_size
        num_full_blocks = request.num_tokens // group.block_size
        while block_idx < num_full_blocks and self._is_cached(request, group, block_idx):
            block_idx += 1
        return _Missing(group, block_idx)

    def _gap_of_run(self, request: CacheRequest, num_tokens: int) -> _Missing | None:
        """The last missing block among the blocks that a hit of `num_tokens` tokens needs."""
        for group in self._groups:
            first = group.get_num_skipped_tokens(num_tokens) // group.block_size
            for block_idx in range(num_tokens // group.block_size - 1, first - 1, -1):
                if not self._is_cached(request, group, block_idx):
                    return _Missing(group, block_idx)
        return None

    def _is_cached(self, request: CacheRequest, group: PrefixGroup, block_idx: int) -> bool:
        block_hash = self._block_hash(request, group, block_idx)
        return self._block_pool.get_cached_block(block_hash, (group.group_id,)) is not None

    def _block_hash(self, request: CacheRequest, group: PrefixGroup, block_idx: int) -> BlockHash:
        hashes = with_block_size(request.block_hashes, self._hash_block_size, group.block_size)
        return hashes[block_idx]

    def _first_block_reason(self, request: CacheRequest) -> MissReason:
        """Why the first block was not found: compares the requests that cached its tokens.

        Salt and adapter enter the hash of the first block, so a difference always shows there.
        """
        group = self._first_block_group
        others = [
            other
            for other in self._first_blocks.get(self._first_tokens(request), ())
            if self._block_pool.get_cached_block(other.block_hash, (group.group_id,)) is not None
        ]
        has_own_salt = [other for other in others if other.cache_salt == request.cache_salt]
        if any(other.lora_name != request.lora_name for other in has_own_salt):
            return "lora"
        if len(others) > len(has_own_salt):
            return "salt"
        # No request cached these tokens, or one did with other images.
        return "first_block_differs"

    def _first_tokens(self, request: CacheRequest) -> tuple[int, ...]:
        return tuple(request.all_token_ids[: self._first_block_group.block_size])

    def _remember_first_block(self, request: CacheRequest) -> None:
        if request.num_tokens < self._first_block_group.block_size:
            return
        tokens = self._first_tokens(request)
        first_block = _FirstBlock(
            self._block_hash(request, self._first_block_group, 0),
            request.cache_salt,
            request.lora_name,
        )
        names = self._first_blocks.get(tokens)
        if names is None:
            names = self._first_blocks[tokens] = deque(maxlen=_MAX_NAMES_PER_FIRST_BLOCK)
            if len(self._first_blocks) > MAX_FIRST_BLOCKS:
                self._first_blocks.popitem(last=False)
        if first_block not in names:
            names.append(first_block)
