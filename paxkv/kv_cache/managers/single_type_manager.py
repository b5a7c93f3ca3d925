"""SingleTypeKVCacheManager: the block tables of one KV cache group."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from paxkv.contracts.kv_cache_spec import KVCacheSpec, cdiv
from paxkv.contracts.protocols import CacheRequest
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import BlockHash, get_group_id
from paxkv.kv_cache.managers.device_block_work import DeviceBlockWork
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.kv_cache.pool.block_pool import BlockPool


class SingleTypeKVCacheManager(ABC):
    """The block tables of all requests in one group, with one subclass per kind of attention.

    Args:
        device_block_work: Receives copies; shared by all groups.

    Attributes:
        num_held_blocks: Blocks that this group's requests hold; a shared block counts once.

    Source: vLLM `v1/core/single_type_kv_cache_manager.py`.
    """

    # Whether the blocks hold the decoder's tokens (and not the encoder's).
    is_written_by_decoder: ClassVar[bool] = True
    # Whether block i of a table holds the tokens from `i * block_size` on.
    holds_tokens: ClassVar[bool] = True

    def __init__(
        self,
        *,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        kv_cache_group_id: int,
        device_block_work: DeviceBlockWork | None = None,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.block_size = kv_cache_spec.block_size
        self.block_pool = block_pool
        self.enable_caching = block_pool.enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.device_block_work = device_block_work or DeviceBlockWork()
        self.num_held_blocks = 0
        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        # Request id -> number of leading blocks that were added to the prefix cache or found there.
        self.num_cached_blocks: dict[str, int] = {}
        # Request id -> number of leading blocks that were found. Other requests have written them.
        self.num_found_blocks: dict[str, int] = {}
        # Request id -> number of leading blocks that were freed and are null; no entry means 0.
        self.num_skipped_blocks: dict[str, int] = {}

    def get_blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The request's block table; empty if the request holds no blocks."""
        return self.req_to_blocks.get(request_id, ())

    def get_first_step_blocks(self, request_id: str) -> Sequence[KVCacheBlock]:
        """The block table of a request that starts or resumes, in the form of `NewRequestData`."""
        return self.get_blocks(request_id)

    def get_extra_blocks(self) -> Iterable[KVCacheBlock]:
        """Blocks that requests hold outside their block tables, once for each holder."""
        return ()

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Number of leading tokens that no token from `num_computed_tokens` on reads."""
        return 0

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
    ) -> int:
        """Number of free blocks that the request needs to hold `num_tokens` tokens.

        These are new blocks, prefix hits without a holder (which leave the free queue), and copies
        of shared blocks that the request will write into.

        Args:
            new_computed_blocks: Prefix hits, or blocks of the fork source.
            total_computed_tokens: Tokens computed before this step, including external tokens. The
                step writes from this position on.
            num_tokens_main_model: `num_tokens` without lookahead.
        """
        block_size = self.block_size
        num_required = -(-num_tokens // block_size)
        first_written = total_computed_tokens // block_size
        blocks = self.req_to_blocks.get(request_id)
        if blocks is not None:
            num_present = len(blocks)
            num_new = num_required - num_present if num_required > num_present else 0
            if first_written < num_present:
                for block in blocks[first_written:num_required]:
                    num_new += block.ref_cnt > 1 or block.block_hash is not None
            return num_new
        num_skipped = self.get_num_skipped_tokens(total_computed_tokens) // block_size
        num_present = max(num_skipped, len(new_computed_blocks))
        num_new = max(num_required - num_present, 0)
        for block in new_computed_blocks[num_skipped:]:
            num_new += block.ref_cnt == 0 and not block.is_null
        for block in new_computed_blocks[first_written:num_required]:
            # `ref_cnt` does not count this request yet.
            num_new += block.ref_cnt > 0 or block.block_hash is not None
        return num_new

    def get_num_blocks_for_full_sequence(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_new_tokens: int,
    ) -> int:
        """Number of free blocks that the request needs to compute all `num_tokens` tokens.

        Args:
            num_new_tokens: Tokens that each step computes.
        """
        return self.get_num_blocks_to_allocate(
            request_id, num_tokens, new_computed_blocks, total_computed_tokens, num_tokens
        )

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Starts a block table with prefix hits, or with blocks of the fork source.

        Blocks that no later token reads become null blocks, also for external tokens. The other
        external tokens get blocks from `allocate_new_blocks`, after all groups have touched their
        hits. Otherwise a new block might be another group's hit.

        Args:
            num_local_computed_tokens: Tokens in `new_computed_blocks`.
            num_external_computed_tokens: Further tokens, which a connector loads.

        Raises:
            InvariantError: The request has a block table already.
        """
        block_size = self.block_size
        num_computed_tokens = num_local_computed_tokens + num_external_computed_tokens
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // block_size
        if not new_computed_blocks and num_skipped == 0:
            return
        if request_id in self.req_to_blocks:
            raise InvariantError(f"{request_id=} got computed blocks, but holds blocks already.")
        kept_blocks = new_computed_blocks[num_skipped:]
        self._touch(kept_blocks)
        self.req_to_blocks[request_id] = [self.block_pool.null_block] * num_skipped
        self.req_to_blocks[request_id] += kept_blocks
        # The last block of a fork may be partly filled; it is cached when it is full.
        num_found = max(num_skipped, num_local_computed_tokens // block_size)
        self.num_cached_blocks[request_id] = self.num_found_blocks[request_id] = num_found
        if num_skipped > 0:
            self.num_skipped_blocks[request_id] = num_skipped

    def replace_shared_blocks(
        self, request_id: str, num_computed_tokens: int, num_tokens: int
    ) -> None:
        """Copy-on-write, before tokens `num_computed_tokens` to `num_tokens` are written.

        A block that another request holds, or could find by its hash, is replaced by a new block.
        The request's computed tokens in it are copied. For a fork this happens at its admission;
        afterwards the tables of running requests only grow, unless a request must recompute
        tokens in a shared block.
        """
        blocks = self.req_to_blocks.get(request_id)
        first_written = num_computed_tokens // self.block_size
        if blocks is None or first_written >= len(blocks):
            return
        for block_idx in range(first_written, min(cdiv(num_tokens, self.block_size), len(blocks))):
            block = blocks[block_idx]
            if block.is_null or (block.ref_cnt == 1 and block.block_hash is None):
                continue
            (new_block,) = self.block_pool.get_new_blocks(1)
            self.num_held_blocks += 1
            if block_idx * self.block_size < num_computed_tokens:
                self.device_block_work.record_copy(block, new_block)
            blocks[block_idx] = new_block
            self._free_blocks((block,))
            self.block_pool.report_replaced(request_id)
            # The new block counts as not cached. It is cached when it is full.
            for counts in (self.num_cached_blocks, self.num_found_blocks):
                counts[request_id] = min(counts.get(request_id, 0), block_idx)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        """Allocates blocks until the request has slots for `num_tokens` tokens; returns them.

        Args:
            num_tokens_main_model: `num_tokens` without lookahead.
        """
        blocks = self.req_to_blocks.get(request_id)
        num_required = -(-num_tokens // self.block_size)
        num_new_blocks = num_required if blocks is None else num_required - len(blocks)
        if num_new_blocks <= 0:
            return ()
        new_blocks = self.block_pool.get_new_blocks(num_new_blocks)
        self.num_held_blocks += num_new_blocks
        if blocks is None:
            self.req_to_blocks[request_id] = list(new_blocks)
        else:
            blocks += new_blocks
        return new_blocks

    def cache_blocks(self, request: CacheRequest, num_tokens: int) -> None:
        """Adds the blocks that the request's first `num_tokens` tokens fill to the prefix cache."""
        request_id = request.request_id
        num_cached_blocks = self.num_cached_blocks.get(request_id, 0)
        num_full_blocks = num_tokens // self.block_size
        if num_full_blocks <= num_cached_blocks:
            return
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=self.req_to_blocks[request_id],
            num_cached_blocks=num_cached_blocks,
            num_full_blocks=num_full_blocks,
            block_size=self.block_size,
            kv_cache_group_id=self.kv_cache_group_id,
        )
        self.num_cached_blocks[request_id] = num_full_blocks

    def remove_skipped_blocks(self, request_id: str, num_computed_tokens: int) -> None:
        """Frees blocks that no token from `num_computed_tokens` on reads.

        The cost is O(blocks freed by this call).
        """
        blocks = self.req_to_blocks.get(request_id)
        if blocks is None:
            return
        num_skipped = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        num_before = self.num_skipped_blocks.get(request_id, 0)
        if num_skipped <= num_before:
            return
        removed_blocks = blocks[num_before:num_skipped]
        blocks[num_before:num_skipped] = [self.block_pool.null_block] * len(removed_blocks)
        self.num_skipped_blocks[request_id] = num_before + len(removed_blocks)
        # In reverse order, as in `free`: the blocks further left are evicted later.
        self._free_blocks(removed_blocks[::-1])

    def free(self, request_id: str, num_computed_tokens: int) -> None:
        """Frees the request's blocks, if it has any.

        Args:
            num_computed_tokens: Tokens that are written, or will be written by a step in flight.
                Blocks are cached when they are allocated. Blocks past these tokens are removed
                from the prefix cache, because they will never be written.
        """
        blocks = self.req_to_blocks.pop(request_id, None)
        if blocks is None:
            return
        num_cached_blocks = self.num_cached_blocks.pop(request_id, 0)
        self.num_skipped_blocks.pop(request_id, None)
        num_written = num_computed_tokens // self.block_size
        # A request that waits for a load may have prefix hits, but has no computed tokens yet.
        num_written = max(num_written, self.num_found_blocks.pop(request_id, 0))
        self.block_pool.evict(blocks[num_written:num_cached_blocks])
        # In reverse order, so that the tail of a sequence is evicted before its prefix, which
        # other requests may share.
        self._free_blocks(blocks[::-1])

    def get_blocks_to_fork(
        self, request_id: str, num_tokens: int, num_computed_tokens: int, *, is_final: bool
    ) -> list[KVCacheBlock] | None:
        """Blocks that a fork of the request needs to continue after `num_tokens` tokens.

        The last block may be partly filled. Blocks that no later token reads are null blocks.

        Args:
            num_computed_tokens: The request's computed tokens, at least `num_tokens`.
            is_final: The request has ended, and has no later state than that of these tokens.

        Returns:
            The blocks; None if the request does not hold one of them any more.
        """
        num_blocks = cdiv(num_tokens, self.block_size)
        blocks = self.req_to_blocks.get(request_id, [])
        num_skipped = self.get_num_skipped_tokens(num_tokens) // self.block_size
        needed = blocks[num_skipped:num_blocks]
        if len(blocks) < num_blocks or any(block.is_null for block in needed):
            return None
        return [self.block_pool.null_block] * num_skipped + needed

    def get_max_tokens_before_allocate(
        self, request_id: str, *, are_cached_late: bool = False
    ) -> int:
        """Largest number of tokens for which `allocate_slots` has nothing to do.

        Up to this number, including new and lookahead tokens, every token has a slot, no block
        becomes full, and no block is freed.

        Args:
            are_cached_late: Ignore that blocks become full, because the caller calls `cache_blocks`
                when it knows their tokens.
        """
        num_slots = len(self.req_to_blocks.get(request_id, ())) * self.block_size
        if are_cached_late or not self.enable_caching:
            return num_slots
        num_full_at = (self.num_cached_blocks.get(request_id, 0) + 1) * self.block_size
        return num_slots if num_slots < num_full_at else num_full_at - 1

    def get_num_unused_slots(self, request_id: str, num_computed_tokens: int) -> int:
        """Number of slots at the end of the request's table that hold no computed token."""
        num_slots = len(self.req_to_blocks.get(request_id, ())) * self.block_size
        # If a request waits for a load, its prefix hits are filled, though no token counts as
        # computed. If a request ended while steps were in flight, `num_computed_tokens` was
        # reduced, but blocks that these steps did not need are freed already.
        num_found_tokens = self.num_found_blocks.get(request_id, 0) * self.block_size
        num_gone_tokens = self.num_skipped_blocks.get(request_id, 0) * self.block_size
        num_used = max(num_computed_tokens, num_found_tokens, num_gone_tokens)
        return max(num_slots - num_used, 0)

    def get_permanent_blocks(self) -> Sequence[KVCacheBlock]:
        """Blocks that the group itself holds, independently of requests."""
        return ()

    @classmethod
    @abstractmethod
    def find_longest_cache_hit(
        cls,
        *,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
    ) -> tuple[list[KVCacheBlock], ...]:
        """Cached blocks of the longest prefix after which all the groups can continue.

        Args:
            block_hashes: Hashes of blocks of this spec's size.
            max_length: Largest number of tokens of the hit, including the dropped block.
            kv_cache_group_ids: Groups with this spec.
            use_eagle: Drop the last block of the hit, because the drafter needs its tokens
                computed again.
            alignment_tokens: The hit, without the dropped block, is a multiple of this number.

        Returns:
            A list of blocks per group, all equally long, with null blocks in place of blocks that
            are not needed.
        """

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Number of leading blocks that every request holds. Any running request can be passed."""
        return 0

    def check_invariants(self) -> None:
        """Checks that block tables match the counts of cached, null and held blocks. O(blocks).

        Raises:
            InvariantError: A rule is broken.
        """
        held_ids: set[int] = set()
        for request_id, blocks in self.req_to_blocks.items():
            num_cached = self.num_cached_blocks.get(request_id, 0)
            if num_cached > len(blocks) or any(b.block_hash for b in blocks[num_cached:]):
                raise InvariantError(f"{request_id=} counts {num_cached=} of {blocks=}.")
            num_null = self.num_skipped_blocks.get(request_id, 0)
            for block_idx, block in enumerate(blocks):
                if block.is_null != (block_idx < num_null):
                    raise InvariantError(
                        f"{request_id=} must have {num_null} null blocks and then others: {blocks=}"
                    )
            owned = blocks[num_null:]
            group_ids = {get_group_id(b.block_hash) for b in owned if b.block_hash is not None}
            if not group_ids <= {self.kv_cache_group_id}:
                raise InvariantError(f"{request_id=} holds a block of another group: {blocks=}.")
            held_ids.update(block.block_id for block in owned)
        if len(held_ids) != self.num_held_blocks:
            raise InvariantError(f"{len(held_ids)} blocks held, counted {self.num_held_blocks=}.")
        counted = self.num_cached_blocks.keys() | self.num_skipped_blocks.keys()
        counted |= self.num_found_blocks.keys()
        if not counted <= self.req_to_blocks.keys():
            raise InvariantError(f"{counted=} names requests that hold no blocks.")

    def _touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        num_free_blocks = self.block_pool.get_num_free_blocks()
        self.block_pool.touch(blocks)
        self.num_held_blocks += num_free_blocks - self.block_pool.get_num_free_blocks()

    def _free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        num_free_blocks = self.block_pool.get_num_free_blocks()
        self.block_pool.free_blocks(ordered_blocks)
        self.num_held_blocks -= self.block_pool.get_num_free_blocks() - num_free_blocks
