"""PrefixCacheMissExplainer: answers why a request did not find more in the prefix cache."""

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
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
# Of one content, under so many salts and adapters.
_MAX_NAMES_PER_FIRST_BLOCK = 8


class _Lookup(NamedTuple):
    """What was found, at the moment of looking: enough to answer from later.

    Args:
        missing_key: Hash of the first block that was not found; None where there is none.
        num_evicted: The pool's clock of evictions at that moment.
    """

    num_tokens: int
    num_hit_tokens: int
    reason: MissReason
    block_idx: int | None = None
    block_size: int | None = None
    missing_key: BlockHashWithGroupId | None = None
    num_evicted: int = 0


class _FirstBlock(NamedTuple):
    """A first block that some request cached, and what else than its tokens it is named by."""

    block_hash: BlockHash
    cache_salt: str | None
    lora_name: str | None


class PrefixCacheMissExplainer:
    """Remembers each admission's look-up, and says on demand what it means.

    It speaks of other requests' prompts, from which salts are to keep tenants apart: its answers
    are for the operator.

    Cost: an admission takes a few microseconds here, whatever the prompt's length; a question
    searches the pool's memory of evicted hashes, some hundred microseconds. Memory is bounded.

    Args:
        group_block_sizes: Block size of each KV cache group that takes part in prefix hits, by
            group id.
        hash_block_size: Tokens that one of a request's `block_hashes` covers.
    """

    def __init__(
        self,
        *,
        block_pool: BlockPool,
        group_block_sizes: Mapping[int, int],
        hash_block_size: int,
    ) -> None:
        self._block_pool = block_pool
        self._group_block_sizes = dict(group_block_sizes)
        self._hash_block_size = hash_block_size
        # A hit is whole blocks of every group.
        self._alignment = math.lcm(*group_block_sizes.values())
        self._lookups: OrderedDict[str, _Lookup] = OrderedDict()
        self._first_blocks: OrderedDict[tuple[int, ...], deque[_FirstBlock]] = OrderedDict()

    def record(self, request: CacheRequest, num_hit_tokens: int) -> None:
        """Keeps what an admission found.

        To be called before the request's own blocks are allocated and cached.
        """
        # One that resumes finds its own blocks: its first admission is what is asked about.
        if request.num_preemptions > 0 and request.request_id in self._lookups:
            return
        self._lookups[request.request_id] = self._look_up(request, num_hit_tokens)
        self._lookups.move_to_end(request.request_id)
        if len(self._lookups) > MAX_ANSWERS:
            self._lookups.popitem(last=False)
        if num_hit_tokens == 0 and self._block_pool.enable_caching:
            self._remember_first_block(request)

    def answer(self, request_id: str) -> PrefixCacheMiss | None:
        """Why an admitted request missed; None when it was not among the last admitted."""
        lookup = self._lookups.get(request_id)
        return None if lookup is None else self._explain(request_id, lookup)

    def explain(self, request: CacheRequest, num_hit_tokens: int) -> PrefixCacheMiss:
        """Why a request that is not admitted yet would miss now; nothing is kept."""
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
        )

    def _look_up(self, request: CacheRequest, num_hit_tokens: int) -> _Lookup:
        num_tokens = request.num_tokens
        if not self._block_pool.enable_caching or request.skip_reading_prefix_cache:
            return _Lookup(num_tokens, num_hit_tokens, "disabled")
        # The last token is always computed: its logits give the next one.
        if num_tokens - 1 < self._alignment:
            return _Lookup(num_tokens, num_hit_tokens, "too_short")
        if num_hit_tokens + self._alignment > num_tokens - 1:
            return _Lookup(num_tokens, num_hit_tokens, "hit")
        for group_id, block_size in self._group_block_sizes.items():
            block_idx = num_hit_tokens // block_size
            block_hash = self._block_hash(request, block_size, block_idx)
            if self._block_pool.get_cached_block(block_hash, (group_id,)) is None:
                return _Lookup(
                    num_tokens,
                    num_hit_tokens,
                    "block_differs" if block_idx > 0 else self._first_block_reason(request),
                    block_idx,
                    block_size,
                    make_block_hash_with_group_id(block_hash, group_id),
                    self._block_pool.evicted_hashes.num_evicted,
                )
        return _Lookup(num_tokens, num_hit_tokens, "shortened")

    def _block_hash(self, request: CacheRequest, block_size: int, block_idx: int) -> BlockHash:
        return with_block_size(request.block_hashes, self._hash_block_size, block_size)[block_idx]

    def _first_block_reason(self, request: CacheRequest) -> MissReason:
        """Why the first block was not found, by who cached the same tokens.

        Salt and adapter enter the first block, so a difference in them always shows there.
        """
        group_id, block_size = next(iter(self._group_block_sizes.items()))
        others = [
            other
            for other in self._first_blocks.get(tuple(request.all_token_ids[:block_size]), ())
            if self._block_pool.get_cached_block(other.block_hash, (group_id,)) is not None
        ]
        has_own_salt = [other for other in others if other.cache_salt == request.cache_salt]
        if any(other.lora_name != request.lora_name for other in has_own_salt):
            return "lora"
        if len(others) > len(has_own_salt):
            return "salt"
        # None, or the same tokens with other images.
        return "first_block_differs"

    def _remember_first_block(self, request: CacheRequest) -> None:
        block_size = next(iter(self._group_block_sizes.values()))
        if request.num_tokens < block_size:
            return
        tokens = tuple(request.all_token_ids[:block_size])
        first_block = _FirstBlock(
            self._block_hash(request, block_size, 0), request.cache_salt, request.lora_name
        )
        names = self._first_blocks.get(tokens)
        if names is None:
            names = self._first_blocks[tokens] = deque(maxlen=_MAX_NAMES_PER_FIRST_BLOCK)
            if len(self._first_blocks) > MAX_FIRST_BLOCKS:
                self._first_blocks.popitem(last=False)
        if first_block not in names:
            names.append(first_block)
