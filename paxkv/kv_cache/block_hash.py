"""Names of full blocks: SHA-256 of a block's tokens, chained to the hash of the block before."""

import hashlib
import os
import struct
from collections.abc import Sequence
from typing import NewType

# Names the tokens of a block and of everything before it.
BlockHash = NewType("BlockHash", bytes)
# The same, for one KV cache group: groups store different K and V for the same tokens.
BlockHashWithGroupId = NewType("BlockHashWithGroupId", bytes)

_GROUP_ID_BYTES = 4


def make_block_hash_with_group_id(block_hash: BlockHash, group_id: int) -> BlockHashWithGroupId:
    """The group's own key of `block_hash`; inverse of `get_block_hash` and `get_group_id`."""
    return BlockHashWithGroupId(block_hash + group_id.to_bytes(_GROUP_ID_BYTES, "big"))


def get_block_hash(key: BlockHashWithGroupId) -> BlockHash:
    return BlockHash(key[:-_GROUP_ID_BYTES])


def get_group_id(key: BlockHashWithGroupId) -> int:
    return int.from_bytes(key[-_GROUP_ID_BYTES:], "big")


def hash_block_tokens(
    parent_block_hash: BlockHash, token_ids: Sequence[int], extra_keys: Sequence[str] = ()
) -> BlockHash:
    """Hash of a block, given the hash of the block before it.

    SHA-256 and not Python's `hash()`: a collision would show one user another user's context.

    Args:
        parent_block_hash: 32 bytes; of a first block, the engine's `BlockHasher.none_hash`.
        extra_keys: Whatever else the block's K and V depend on, or must be separated by.
    """
    # Each part has a fixed size or says its length, so no two inputs have the same bytes.
    parts = [parent_block_hash, struct.pack(f"<I{len(token_ids)}q", len(token_ids), *token_ids)]
    for key in extra_keys:
        # Salts come from users: a lone surrogate must not raise here.
        encoded = key.encode("utf-8", "surrogatepass")
        parts += (struct.pack("<I", len(encoded)), encoded)
    return BlockHash(hashlib.sha256(b"".join(parts)).digest())


class BlockHasher:
    """Hashes the full blocks of requests, from a start that is the engine's own.

    Args:
        seed: Engines with the same seed give equal blocks equal hashes. None starts from random
            bytes, so that nobody outside can prepare a prompt that collides.
    """

    def __init__(self, *, block_size: int, seed: str | None = None) -> None:
        self.block_size = block_size
        self.none_hash = BlockHash(
            os.urandom(32) if seed is None else hashlib.sha256(seed.encode()).digest()
        )

    def extend(
        self, block_hashes: list[BlockHash], token_ids: Sequence[int], cache_salt: str | None
    ) -> None:
        """Appends the hashes of those full blocks of `token_ids` that have none yet.

        Args:
            block_hashes: Hashes of the first full blocks of `token_ids`; extended in place.
            cache_salt: Enters the first block, and through the chain every later one.
        """
        start = len(block_hashes) * self.block_size
        while start + self.block_size <= len(token_ids):
            parent = block_hashes[-1] if block_hashes else self.none_hash
            extra_keys = (cache_salt,) if cache_salt is not None and start == 0 else ()
            end = start + self.block_size
            block_hashes.append(hash_block_tokens(parent, token_ids[start:end], extra_keys))
            start = end
