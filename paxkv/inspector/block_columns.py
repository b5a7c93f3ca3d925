"""`make_columns`: encodes the blocks of a pool as columns of bytes."""

import numpy as np

from paxkv.contracts.observation import BlockColumns
from paxkv.kv_cache.observers.block_changes import BlockChangeLog

_MAX_U16 = 65535


def make_columns(log: BlockChangeLog, ids_np: np.ndarray | None) -> BlockColumns:
    """Encodes blocks `ids_np`, i64[num_ids], or all; their state is of the last `drain_changed`."""
    chosen = slice(None) if ids_np is None else ids_np
    contents_np = log.contents if ids_np is None else log.get_contents(ids_np)
    return BlockColumns(
        block_ids=None if ids_np is None else ids_np.astype("<u4").tobytes(),
        ref_counts=_u16(log.ref_cnts[chosen]),
        hashes=contents_np["hash"].tobytes(),
        parents=contents_np["parent"].tobytes(),
        depths=_u16(contents_np["depth"]),
        groups=contents_np["group"].tobytes(),
        num_hits=_u16(log.num_hits[chosen]),
    )


def _u16(values_np: np.ndarray) -> bytes:
    return np.minimum(values_np, _MAX_U16).astype("<u2").tobytes()
