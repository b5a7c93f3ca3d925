"""BlockChangeLog: the contents of a pool's blocks, and the blocks that changed since a reading."""

import functools
from array import array
from collections.abc import Container, Sequence

import numpy as np

from paxkv.contracts.observation import HASH_BYTES
from paxkv.contracts.protocols import CacheRequest
from paxkv.kv_cache.hashing.block_hash import BlockHash, BlockHashWithGroupId
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.pool.block import KVCacheBlock

_NO_HASH = bytes(HASH_BYTES)
# The content of a cached block: the first bytes of its hash and of the previous block's hash, its
# index in a block table plus 1, and its KV cache group. All zeros if the block is not cached. If
# the block was cached before the log was made, only hash and group are known until a request uses
# it.
CONTENT = np.dtype(
    [("hash", f"V{HASH_BYTES}"), ("parent", f"V{HASH_BYTES}"), ("depth", "u4"), ("group", "u1")]
)

_BYTES = np.dtype(f"V{CONTENT.itemsize}")


class BlockChangeLog(BlockPoolObserver):
    """The content of each block, and the blocks that changed since the last `drain_changed`.

    During a step, events are only appended to buffers, which is cheap. When the log is read, the
    buffered events are applied all at once. Memory is bounded by the number of blocks, even if the
    log is never read.

    Args:
        blocks: All blocks of the pool, in order.
        keeps_tokens: Also keep the tokens of blocks that become cached.

    Attributes:
        replaced_req_ids: Requests in whose tables a block was replaced since `drain_changed`.
        has_shared: Whether a prefix hit or a fork used a block since `drain_changed`.
        num_evictions: Number of blocks that lost their content since the log was made.
        num_hits: u32[num_blocks], how often prefix hits and forks used the cached content.
        ref_cnts: i32[num_blocks], as of the last `drain_changed` or later.
        token_ids: Tokens by block id, for blocks that became cached while `keeps_tokens`.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock], *, keeps_tokens: bool = False) -> None:
        num_blocks = len(blocks)
        self.replaced_req_ids: set[str] = set()
        self.has_shared = False
        self.num_evictions = 0
        # Writing single numbers is faster in arrays than in NumPy. Both views share the memory.
        self._num_hits = array("I", bytes(4 * num_blocks))
        self._ref_cnts = array("i", [block.ref_cnt for block in blocks])
        self._is_changed = bytearray(num_blocks)
        self.num_hits = np.frombuffer(self._num_hits, np.uint32)
        self.ref_cnts = np.frombuffer(self._ref_cnts, np.int32)
        self._contents = np.zeros(num_blocks, CONTENT)
        self.token_ids: dict[int, tuple[int, ...]] = {}
        self._keeps_tokens = keeps_tokens
        self._has_hits = False
        # Newly allocated blocks are not recorded: readers find them in block tables.
        self._is_changed_np = np.frombuffer(self._is_changed, np.bool_)
        # Buffered changes, oldest first: block ids, and depths (0 for a removed content). For each
        # added content also the block's key and the hash of the previous block, concatenated.
        self._ids, self._depths = array("I"), array("I")
        self._keys, self._parents = bytearray(), bytearray()
        cached = [block for block in blocks if block.block_hash is not None]
        if cached:
            ids = [block.block_id for block in cached]
            keys_np = _read_keys(b"".join([block.block_hash for block in cached]), len(cached))
            self._contents["hash"][ids] = keys_np["hash"]
            self._contents["group"][ids] = keys_np["group"]

    @property
    def contents(self) -> np.ndarray:
        """CONTENT[num_blocks]."""
        self._learn()
        return self._contents

    def on_released(
        self, blocks: Sequence[KVCacheBlock], free_blocks: Sequence[KVCacheBlock]
    ) -> None:
        is_changed, ref_cnts = self._is_changed, self._ref_cnts
        for block in blocks:
            block_id = block.block_id
            is_changed[block_id] = 1
            ref_cnts[block_id] = block.ref_cnt
        for block in free_blocks if self._has_hits else ():
            if block.block_hash is None:
                # The block is not cached, so its content is lost.
                self._num_hits[block.block_id] = 0

    def on_touched(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.has_shared = self._has_hits = True
        is_changed, ref_cnts, num_hits = self._is_changed, self._ref_cnts, self._num_hits
        for block in blocks:
            block_id = block.block_id
            is_changed[block_id] = 1
            ref_cnts[block_id] = block.ref_cnt
            num_hits[block_id] += 1

    def on_replaced(self, request_id: str) -> None:
        self.replaced_req_ids.add(request_id)

    def on_cached(
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
        for block_idx, block in zip(block_idxs, blocks, strict=True):
            block_id = block.block_id
            self._ids.append(block_id)
            self._depths.append(block_idx + 1)
            self._keys += block.block_hash
            # For the first block, this appends a wrong hash; `_learn` clears it where depth is 1.
            self._parents += block_hashes[block_idx - 1]
            if self._keeps_tokens:
                start = block_idx * block_size
                # Unlike lists, tuples of numbers cost the garbage collector nothing.
                self.token_ids[block_id] = tuple(request.all_token_ids[start : start + block_size])
            if len(self._ids) >= len(self._is_changed):
                self._learn()

    def on_seen(
        self,
        request: CacheRequest,
        blocks: Sequence[KVCacheBlock],
        start_idx: int,
        block_hashes: Sequence[BlockHash],
        block_size: int,
    ) -> None:
        """Records the content of consecutive blocks of a request, starting at index `start_idx`.

        Skips blocks that are not cached, and blocks whose content the log already knows.
        """
        ids = [block.block_id for block in blocks]
        unknown = [
            (block_id, block_idx, block)
            for block_idx, (block_id, block, depth) in enumerate(
                zip(ids, blocks, self._contents["depth"][ids].tolist(), strict=True), start_idx
            )
            if depth == 0 and block.block_hash is not None
        ]
        self._ids.extend([block_id for block_id, _, _ in unknown])
        self._depths.extend([block_idx + 1 for _, block_idx, _ in unknown])
        self._keys += b"".join([block.block_hash for _, _, block in unknown])
        self._parents += b"".join([block_hashes[block_idx - 1] for _, block_idx, _ in unknown])
        if self._keeps_tokens:
            for block_id, block_idx, _ in unknown:
                start = block_idx * block_size
                self.token_ids[block_id] = tuple(request.all_token_ids[start : start + block_size])

    def on_evicted(
        self,
        blocks: Sequence[KVCacheBlock],
        keys: Sequence[BlockHashWithGroupId],
        findable: Container[BlockHashWithGroupId],
    ) -> None:
        self._forget(blocks)

    def on_reset(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._forget(blocks)

    def _forget(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.num_evictions += len(blocks)
        for block in blocks:
            block_id = block.block_id
            self._ids.append(block_id)
            self._depths.append(0)
            if self._has_hits:
                self._num_hits[block_id] = 0
            if self._keeps_tokens:
                self.token_ids.pop(block_id, None)

    def get_contents(self, ids_np: np.ndarray) -> np.ndarray:
        """Contents CONTENT[num_ids] of the blocks with ids i64[num_ids]."""
        return self.contents.view(_BYTES)[ids_np].view(CONTENT)

    def drain_changed(self, new_blocks: Sequence[KVCacheBlock]) -> np.ndarray:
        """Sorted ids of all blocks that changed since the last call, i64[num_changed].

        Args:
            new_blocks: Blocks that were added to block tables since the last call.
        """
        self._learn()
        new_ids_np = np.array([block.block_id for block in new_blocks], np.intp)
        self.ref_cnts[new_ids_np] = [block.ref_cnt for block in new_blocks]
        self._is_changed_np[new_ids_np] = True
        ids_np = np.flatnonzero(self._is_changed_np)
        self._is_changed_np[ids_np] = False
        self.replaced_req_ids, self.has_shared = set(), False
        return ids_np

    def _learn(self) -> None:
        """Applies the buffered changes to `_contents`."""
        if not self._ids:
            return
        ids_np = np.array(self._ids, np.intp)
        contents_np = np.zeros(len(ids_np), CONTENT)
        contents_np["depth"] = self._depths
        num_came = int(np.count_nonzero(contents_np["depth"]))
        if num_came:
            # In nearly all cases every change is an added content.
            came = slice(None) if num_came == len(ids_np) else contents_np["depth"] > 0
            keys_np = _read_keys(self._keys, num_came)
            contents_np["hash"][came] = keys_np["hash"]
            contents_np["group"][came] = keys_np["group"]
            contents_np["parent"][came] = _read_keys(self._parents, num_came)["hash"]
            contents_np["parent"][contents_np["depth"] == 1] = _NO_HASH
        # If an id occurs several times, NumPy keeps the last value. The views as bytes are faster,
        # because NumPy copies records field by field.
        self._contents.view(_BYTES)[ids_np] = contents_np.view(_BYTES)
        self._is_changed_np[ids_np] = True
        self._ids, self._depths = array("I"), array("I")
        self._keys, self._parents = bytearray(), bytearray()


def _read_keys(keys: bytes | bytearray, num_keys: int) -> np.ndarray:
    """Reads (hash, group)[num_keys] from concatenated keys of `make_block_hash_with_group_id`."""
    return np.frombuffer(keys, _key_dtype(len(keys) // num_keys))


@functools.cache
def _key_dtype(key_bytes: int) -> np.dtype:
    return np.dtype(
        {
            "names": ("hash", "group"),
            "formats": (f"V{HASH_BYTES}", "u1"),
            "offsets": (0, key_bytes - 1),
            "itemsize": key_bytes,
        }
    )
