"""Block hashes: a full block's hash covers its tokens and the hash of the block before it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NewType, overload

from paxkv.config.cache_config import PrefixCachingHashAlgo
from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources
from paxkv.kv_cache.hashing.hash_algorithms import get_hash_algorithm

# Identifies the tokens of a block and all tokens before it.
BlockHash = NewType("BlockHash", bytes)
# A block hash with a KV cache group id: groups store different K and V for the same tokens.
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

_GROUP_ID_BYTES = 4


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """Combines a hash and a group id; `get_block_hash` and `get_group_id` split them again."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(_GROUP_ID_BYTES, "big"))


def make_block_hashes_with_group_id(
    block_hashes: Iterable[BlockHash], group_id: int
) -> Iterator[BlockHashWithGroupId]:
    """Applies `make_block_hash_with_group_id` lazily, so a caller that stops early saves work."""
    group_bytes = group_id.to_bytes(_GROUP_ID_BYTES, "big")
    return (BlockHashWithGroupId(block_hash + group_bytes) for block_hash in block_hashes)


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


class BlockHashListWithBlockSize(Sequence[BlockHash]):
    """A view of the hashes of small blocks as hashes of larger blocks; nothing is copied.

    The hash of a large block is the hash of the last small block in it, because that covers all
    tokens before it. The view grows with the list. A slice of the view is a list.

        block_hashes of 16 tokens   h0 h1 h2 h3 h4
        block_size 32               h1 h3

    Raises:
        InvariantError: `block_size` is not a multiple of `hash_block_size`.
    """

    __slots__ = ("_block_hashes", "_scale")

    def __init__(
        self, block_hashes: Sequence[BlockHash], hash_block_size: int, block_size: int
    ) -> None:
        self._block_hashes = block_hashes
        self._scale = _scale(hash_block_size, block_size)

    def __len__(self) -> int:
        return len(self._block_hashes) // self._scale

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...

    @overload
    def __getitem__(self, index: slice) -> list[BlockHash]: ...

    def __getitem__(self, index: int | slice) -> BlockHash | list[BlockHash]:
        # The range handles negative indices and slices.
        chosen = range(self._scale - 1, len(self._block_hashes), self._scale)[index]
        if isinstance(chosen, range):
            return [self._block_hashes[idx] for idx in chosen]
        return self._block_hashes[chosen]

    def __iter__(self) -> Iterator[BlockHash]:
        return islice(self._block_hashes, self._scale - 1, None, self._scale)


def with_block_size(
    block_hashes: Sequence[BlockHash], hash_block_size: int, block_size: int
) -> Sequence[BlockHash]:
    """Hashes of blocks of `block_size` tokens; the list itself if the sizes are equal."""
    if hash_block_size == block_size:
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)


def _scale(hash_block_size: int, block_size: int) -> int:
    scale, rest = divmod(block_size, hash_block_size)
    if rest:
        raise InvariantError(f"{block_size=} must be a multiple of {hash_block_size=}.")
    return scale


class BlockHasher:
    """Hashes the full blocks of requests.

    Args:
        block_size: Tokens per hash: `KVCacheConfig.resolved_hash_block_size`.
        seed: Engines with the same seed, algorithm and block size compute equal hashes for equal
            blocks. With None the chain starts from random bytes, so that an attacker cannot
            prepare a prompt whose hash collides.
    """

    def __init__(
        self,
        *,
        block_size: int,
        seed: str | None = None,
        algorithm: PrefixCachingHashAlgo = "sha256",
    ) -> None:
        self.block_size = block_size
        self._algorithm = get_hash_algorithm(algorithm)
        self.none_hash = BlockHash(self._algorithm.root_hash(seed, block_size))

    def extend(
        self,
        block_hashes: list[BlockHash],
        token_ids: Sequence[int],
        sources: ExtraKeySources | None = None,
    ) -> None:
        """Appends the hashes of full blocks of `token_ids` that are not hashed yet.

        The call has no effect while there are fewer than `(len(block_hashes) + 1) * block_size`
        tokens.

        Args:
            block_hashes: Hashes of the first full blocks of `token_ids`; extended in place.
            sources: Sources of the request's extra keys, the same in every call; None if it has
                none.
        """
        block_size = self.block_size
        start = len(block_hashes) * block_size
        num_blocks = (len(token_ids) - start) // block_size
        if num_blocks < 1:
            return
        extra_keys = None if sources is None else sources.block_keys(block_size, start, num_blocks)
        block_hashes += self._algorithm.hash_chain(
            block_hashes[-1] if block_hashes else self.none_hash,
            token_ids[start : start + num_blocks * block_size],
            block_size,
            extra_keys,
        )
