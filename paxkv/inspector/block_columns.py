"""Blocks of a pool as columns of bytes."""

import sys
from array import array
from collections.abc import Iterable, Sequence

from paxkv.contracts.inspection import HASH_BYTES, BlockColumns
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_changes import BlockChangeLog

_NO_HASH = bytes(HASH_BYTES)
_MAX_U16 = 65535


def make_columns(
    blocks: Sequence[KVCacheBlock], log: BlockChangeLog, *, is_all: bool
) -> BlockColumns:
    """Columns of `blocks`; with `is_all` they are the pool's, in order."""
    origins, hits = log.origins, log.num_hits
    keys = [block.block_hash for block in blocks]
    known = [None if b.block_hash is None else origins.get(b.block_id) for b in blocks]
    return BlockColumns(
        block_ids=None if is_all else u32([block.block_id for block in blocks]),
        ref_counts=_u16([block.ref_cnt for block in blocks]),
        hashes=b"".join([_NO_HASH if key is None else key[:HASH_BYTES] for key in keys]),
        parents=b"".join(
            [
                _NO_HASH
                if origin is None or origin.parent_hash is None
                else origin.parent_hash[:HASH_BYTES]
                for origin in known
            ]
        ),
        depths=_u16([0 if origin is None else origin.block_idx + 1 for origin in known]),
        # The key ends in the group's number; see `make_block_hash_with_group_id`.
        groups=bytes([0 if key is None else key[-1] for key in keys]),
        num_hits=(
            _u16([hits.get(block.block_id, 0) for block in blocks])
            if hits
            else bytes(2 * len(blocks))
        ),
    )


def u32(values: Iterable[int]) -> bytes:
    """Little-endian bytes."""
    return _little_endian(array("I", values))


def _u16(values: list[int]) -> bytes:
    if max(values, default=0) > _MAX_U16:
        values = [min(value, _MAX_U16) for value in values]
    return _little_endian(array("H", values))


def _little_endian(values: array) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
