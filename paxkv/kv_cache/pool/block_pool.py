"""BlockPool: owns all blocks of KV memory, the queue of free blocks, and the prefix cache."""

from collections.abc import Iterable, Iterator, Sequence

from paxkv.contracts.protocols import CacheRequest
from paxkv.errors import ConfigError, InvariantError
from paxkv.kv_cache.hashing.block_hash import (
    BlockHash,
    BlockHashWithGroupId,
    make_block_hash_with_group_id,
    make_block_hashes_with_group_id,
    with_block_size,
)
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.observers.evicted_hashes import EvictedHashes
from paxkv.kv_cache.pool.block import FreeKVCacheBlockQueue, KVCacheBlock


class BlockHashToBlockMap:
    """Cached blocks by hash.

    Several blocks may have the same hash, because block tables keep their blocks when an equal
    block exists. Nearly every hash has one block, which is stored directly; several are stored in
    a dict by id.
    """

    def __init__(self) -> None:
        self._blocks: dict[BlockHashWithGroupId, KVCacheBlock | dict[int, KVCacheBlock]] = {}

    def get_one_block(self, key: BlockHashWithGroupId) -> KVCacheBlock | None:
        """The first block that got this hash; None if no block has it."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def get_run(self, keys: Iterable[BlockHashWithGroupId]) -> list[KVCacheBlock]:
        """The first block of each of `keys`, up to the first key without a block."""
        run: list[KVCacheBlock] = []
        for found in map(self._blocks.get, keys):
            if found is None:
                break
            run.append(next(iter(found.values())) if isinstance(found, dict) else found)
        return run

    def insert(self, key: BlockHashWithGroupId, block: KVCacheBlock) -> bool:
        """Adds a block; returns whether it is the only one with this hash."""
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block
            return True
        if isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[key] = {found.block_id: found, block.block_id: block}
        return False

    def pop(self, key: BlockHashWithGroupId, block_id: int) -> KVCacheBlock | None:
        """Removes and returns the block with this hash and id; None if there is none."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            block = found.pop(block_id, None)
            if len(found) == 1:
                self._blocks[key] = next(iter(found.values()))
            return block
        if found is None or found.block_id != block_id:
            return None
        return self._blocks.pop(key)

    def items(self) -> Iterator[tuple[BlockHashWithGroupId, KVCacheBlock]]:
        """Every (hash, block) pair."""
        for key, found in self._blocks.items():
            for block in found.values() if isinstance(found, dict) else (found,):
                yield key, block

    def __contains__(self, key: BlockHashWithGroupId) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        """Number of different hashes."""
        return len(self._blocks)


class BlockPool:
    """All blocks of KV memory, for all KV cache groups.

    A block without holders is in the free queue but stays in the prefix cache. It loses its hash
    only when it is allocated again. The block at the front of the queue is allocated first.

    Args:
        hash_block_size: Number of tokens that each of a request's `block_hashes` covers. It
            divides every group's block size. None if all block sizes equal it.
        observers: Receive every change of the blocks, in this order; see `add_observer`.

    Attributes:
        evicted_hashes: Recently evicted hashes, with which prefix cache misses are explained.

    Raises:
        ConfigError: There are fewer than 2 blocks. Block 0 is the null block.

    Source: vLLM `v1/core/block_pool.py`.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        enable_caching: bool,
        hash_block_size: int | None = None,
        observers: Iterable[BlockPoolObserver] = (),
    ) -> None:
        if num_blocks < 2:
            raise ConfigError(
                "the KV cache needs at least 2 blocks, because block 0 is the null block; got "
                f"{num_blocks=}. Give the KV cache more memory."
            )
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        # Blocks that layers hold for as long as the pool exists.
        self.num_permanent_blocks = 0
        self.evicted_hashes = EvictedHashes()
        self._observers = list(observers)

    @property
    def observers(self) -> tuple[BlockPoolObserver, ...]:
        """The observers, in the order in which they receive events."""
        return tuple(self._observers)

    def add_observer(self, observer: BlockPoolObserver) -> None:
        """Reports every change from now on to `observer`."""
        self._observers.append(observer)

    def remove_observer(self, observer: BlockPoolObserver) -> None:
        """Stops reporting changes to `observer`.

        Raises:
            ValueError: It is not an observer of this pool.
        """
        self._observers.remove(observer)

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """One cached block per group, in order; None if one of the groups has none."""
        cached_blocks: list[KVCacheBlock] = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            cached_blocks.append(block)
        return cached_blocks

    def get_cached_run(
        self, block_hashes: Iterable[BlockHash], kv_cache_group_id: int
    ) -> list[KVCacheBlock]:
        """A group's cached blocks, in order, up to the first hash without a block."""
        return self.cached_block_hash_to_block.get_run(
            make_block_hashes_with_group_id(block_hashes, kv_cache_group_id)
        )

    def cache_full_blocks(
        self,
        *,
        request: CacheRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> None:
        """Adds the blocks from index `num_cached_blocks` to `num_full_blocks` to the prefix cache.

        Args:
            blocks: All blocks of the request in this group. Null blocks are skipped.
            block_size: Tokens in each block, a multiple of `hash_block_size`.

        Raises:
            InvariantError: One of the blocks is cached already.
        """
        block_hashes = with_block_size(
            request.block_hashes, self.hash_block_size or block_size, block_size
        )
        cached: list[KVCacheBlock] = []
        block_idxs: list[int] = []
        first_idxs: list[int] = []
        for block_idx in range(num_cached_blocks, num_full_blocks):
            block = blocks[block_idx]
            if block.is_null:
                continue
            if block.block_hash is not None:
                raise InvariantError(f"{block!r} is cached already.")
            key = make_block_hash_with_group_id(block_hashes[block_idx], kv_cache_group_id)
            block.block_hash = key
            cached.append(block)
            block_idxs.append(block_idx)
            if self.cached_block_hash_to_block.insert(key, block):
                first_idxs.append(block_idx)
        self._report_cached(
            request=request,
            blocks=cached,
            block_idxs=block_idxs,
            first_idxs=first_idxs,
            block_hashes=block_hashes,
            block_size=block_size,
            group_id=kv_cache_group_id,
        )

    def cache_block(
        self,
        *,
        request: CacheRequest,
        block: KVCacheBlock,
        num_tokens: int,
        block_size: int,
        kv_cache_group_id: int,
    ) -> bool:
        """Adds one block to the prefix cache, under the hash of a request's first tokens.

        Returns False, and changes nothing, if a block with this hash is cached already.

        Args:
            num_tokens: A multiple of `block_size`.

        Raises:
            InvariantError: The block is cached already.
        """
        block_hashes = with_block_size(
            request.block_hashes, self.hash_block_size or block_size, block_size
        )
        block_idx = num_tokens // block_size - 1
        key = make_block_hash_with_group_id(block_hashes[block_idx], kv_cache_group_id)
        if key in self.cached_block_hash_to_block:
            return False
        if block.block_hash is not None:
            raise InvariantError(f"{block!r} is cached already.")
        block.block_hash = key
        self.cached_block_hash_to_block.insert(key, block)
        self._report_cached(
            request=request,
            blocks=[block],
            block_idxs=[block_idx],
            first_idxs=[block_idx],
            block_hashes=block_hashes,
            block_size=block_size,
            group_id=kv_cache_group_id,
        )
        return True

    def _report_cached(
        self,
        *,
        request: CacheRequest,
        blocks: Sequence[KVCacheBlock],
        block_idxs: Sequence[int],
        first_idxs: Sequence[int],
        block_hashes: Sequence[BlockHash],
        block_size: int,
        group_id: int,
    ) -> None:
        for observer in self._observers:
            observer.on_cached(
                request=request,
                blocks=blocks,
                block_idxs=block_idxs,
                first_idxs=first_idxs,
                block_hashes=block_hashes,
                block_size=block_size,
                group_id=group_id,
            )

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocates free blocks, each with one holder, and removes them from the prefix cache.

        Raises:
            InvariantError: Fewer blocks are free. Callers check `get_num_free_blocks` first.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        if self.enable_caching:
            self.evict(blocks)
        for block in blocks:
            block.ref_cnt = 1
        for observer in self._observers:
            observer.on_allocated(blocks)
        return blocks

    def allocate_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Allocates these blocks, which are all free, as `get_new_blocks` does."""
        for block in blocks:
            self.free_block_queue.remove(block)
            block.ref_cnt = 1
        self.evict(blocks)
        for observer in self._observers:
            observer.on_allocated(blocks)

    def allocate_permanent_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Allocates blocks that are never freed. Must be called before any other allocation.

        Raises:
            ConfigError: No block would remain for requests.
        """
        if num_blocks >= self.get_num_free_blocks():
            raise ConfigError(
                f"layers need {num_blocks} permanent KV cache blocks, and only "
                f"{self.get_num_free_blocks()} are free; at least one must remain for requests. "
                "Give the KV cache more memory."
            )
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            block.ref_cnt = 1
        self.num_permanent_blocks += num_blocks
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Adds a holder to each block, as for a prefix hit or a fork."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
        if self._observers:
            touched = [block for block in blocks if not block.is_null]
            for observer in self._observers:
                observer.on_touched(touched)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Removes a holder from each block. Blocks without a holder become free, but stay cached.

        Args:
            ordered_blocks: Blocks in the order in which they will be allocated again.

        Raises:
            InvariantError: One of the blocks has no holder.
        """
        if self._observers:
            ordered_blocks = tuple(ordered_blocks)
        freed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt < 1:
                raise InvariantError(f"{block!r} was freed, but has no holder.")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                freed.append(block)
        self.free_block_queue.append_n(freed)
        if self._observers:
            released = [block for block in ordered_blocks if not block.is_null]
            for observer in self._observers:
                observer.on_released(released, freed)

    def evict(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Removes blocks from the prefix cache; their holders do not change."""
        evicted: list[KVCacheBlock] = []
        keys: list[BlockHashWithGroupId] = []
        for block in blocks:
            key = block.block_hash
            if key is None:
                continue
            # Another block with the same hash stays cached.
            self.cached_block_hash_to_block.pop(key, block.block_id)
            block.block_hash = None
            evicted.append(block)
            keys.append(key)
        if not evicted:
            return
        self.evicted_hashes.add(keys)
        for observer in self._observers:
            observer.on_evicted(evicted, keys, self.cached_block_hash_to_block)

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Removes blocks from the prefix cache by id, for example if their content is invalid."""
        self.evict(self.blocks[block_id] for block_id in block_ids)

    def reset_prefix_cache(self) -> bool:
        """Empties the prefix cache. Returns False, and changes nothing, if requests hold blocks."""
        if self.get_num_free_blocks() != self.num_blocks - 1 - self.num_permanent_blocks:
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        evicted = [block for block in self.blocks if block.block_hash is not None]
        for block in evicted:
            block.block_hash = None
        self.evicted_hashes.clear()
        for observer in self._observers:
            observer.on_reset(evicted)
        return True

    def report_replaced(self, request_id: str) -> None:
        """Reports to the observers that a block in the middle of a block table was replaced.

        Block tables belong to the managers, so the manager that replaced the block calls this.
        """
        for observer in self._observers:
            observer.on_replaced(request_id)

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that requests hold, in [0, 1]."""
        num_usable_blocks = self.num_blocks - 1 - self.num_permanent_blocks
        return 1.0 - self.get_num_free_blocks() / num_usable_blocks

    def check_invariants(self) -> None:
        """Checks that every block is either free or held, and that hashes match the cache. O(n).

        Raises:
            InvariantError: A rule is broken.
        """
        null = self.null_block
        if null.block_id != 0 or not null.is_null or null.ref_cnt or null.block_hash is not None:
            raise InvariantError(f"the null block was changed: {null!r}.")
        free_blocks = self.free_block_queue.get_all_free_blocks()
        if len(free_blocks) != self.get_num_free_blocks():
            raise InvariantError(
                f"free queue counts {self.get_num_free_blocks()} but links {len(free_blocks)}."
            )
        free_ids = {block.block_id for block in free_blocks}
        for block in self.blocks[1:]:
            if block.is_null or block.ref_cnt < 0:
                raise InvariantError(f"{block!r} must not be null or have a negative ref_cnt.")
            if (block.ref_cnt == 0) != (block.block_id in free_ids):
                raise InvariantError(f"{block!r} must be either free or held.")
        if 0 in free_ids or len(free_ids) != len(free_blocks):
            raise InvariantError("the free queue holds the null block, or a block twice.")
        cached_ids: list[int] = []
        for key, block in self.cached_block_hash_to_block.items():
            cached_ids.append(block.block_id)
            if block.block_hash != key:
                raise InvariantError(f"{block!r} is cached under another hash.")
        hashed_ids = [block.block_id for block in self.blocks if block.block_hash is not None]
        if sorted(cached_ids) != hashed_ids or (hashed_ids and not self.enable_caching):
            raise InvariantError(f"blocks {hashed_ids} have a hash, {cached_ids} are cached.")
