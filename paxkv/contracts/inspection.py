"""What the inspector sees of an engine: frames, each the whole picture or what changed since.

Arrays travel as little-endian bytes, which JSON carries in base64: a pool of 100,000 blocks is told
in a few milliseconds.
"""

import dataclasses
from typing import Literal

# Bytes of a block's hash that the page tells contents apart by: exact as a JavaScript number.
HASH_BYTES = 6

BlockState = Literal["free", "cached", "used", "shared", "null"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """Blocks as columns of equal lengths.

    Args:
        block_ids: u32 each; None is all blocks of the pool in order.
        ref_counts: u16 each, cut off there.
        hashes: `HASH_BYTES` of the content's hash each; zeros where the block is not cached.
        parents: The same of the content before it; zeros where there is none, or none is known.
        depths: u16 each: the content's place in a block table, from 1 on; 0 where it is not known.
        groups: u8 each: KV cache group of the content.
        num_hits: u16 each: how often it was found since somebody looks.
    """

    block_ids: bytes | None
    ref_counts: bytes
    hashes: bytes
    parents: bytes
    depths: bytes
    groups: bytes
    num_hits: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TableChanges:
    """Block tables that changed, each of a request in one group.

    A table is `num_skipped` null blocks, then the old blocks up to `num_kept`, which is at least
    that, then `num_new` new ones.

    Args:
        rows: Of (key, group, `num_skipped`, `num_kept`, `num_new`), one after the other; for keys
            see `RequestInfo`.
        new_block_ids: u32 each, of all tables one after the other.
    """

    rows: list[int]
    new_block_ids: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """What never changes of a request.

    Args:
        key: Stands for it in all frames; never used again.
        num_prompt_tokens: Also the rest: 0 where only its blocks are left of it.
        max_num_tokens: At which it ends by its length.
        arrival_time: Seconds since the epoch.
    """

    key: int
    request_id: str
    num_prompt_tokens: int = 0
    max_num_tokens: int = 0
    priority: int = 0
    arrival_time: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupInfo:
    """A KV cache group. `kind` is its spec's class; `window` None where nothing leaves it."""

    kind: str
    block_size: int
    window: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """What never changes of a pool.

    Args:
        permanent_block_ids: Held by layers, whichever requests there are.
    """

    num_blocks: int
    groups: list[GroupInfo]
    permanent_block_ids: list[int]
    enable_prefix_caching: bool
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InspectionCounters:
    """Since somebody looks, but for prefix cache and preemptions, which are since the start.

    Args:
        num_evictions: Blocks that lost their content.
        host_s: Seconds of steps in which the host worked; `device_s`: in which it waited.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    host_s: float = 0.0
    device_s: float = 0.0
    num_preemptions: int = 0
    num_evictions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFrame:
    """A snapshot, or the difference from the frame before it.

    Args:
        pool: Set in a snapshot alone.
        at_s: Seconds since the epoch; in a replayed trace since its start.
        blocks: Those that changed.
        tables: Those that changed; of requests that are new, in full.
        new_requests: Those that no frame before it named, or in a snapshot all.
        gone_keys: Requests that ended and hold nothing any more.
        running: Rows of (key, tokens, computed tokens, cached prompt tokens, preemptions), in the
            order in which they are scheduled, one after the other.
        waiting: Rows of (key, tokens, status, preemptions) of the first `MAX_WAITING_ROWS`.
        num_waiting: How many there are.
        eviction_head: Ids of the free blocks that are handed out next.
        num_free_blocks: Those in the queue.
        ttft_s: Of requests that got their first token since the frame before.
    """

    pool: PoolInfo | None = None
    at_s: float
    blocks: BlockColumns
    tables: TableChanges
    new_requests: list[RequestInfo]
    gone_keys: list[int]
    running: list[int]
    waiting: list[int]
    num_waiting: int
    eviction_head: list[int]
    num_free_blocks: int
    counters: InspectionCounters
    ttft_s: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Answer to the utility call `inspect`.

    Args:
        seq: To be given in the next call.
        took_s: Seconds of the engine's processor that it cost.
        snapshot: Where one was asked for, or the caller has missed a frame.
        delta: None where the caller has missed a frame.
    """

    seq: int
    took_s: float
    snapshot: InspectorFrame | None
    delta: InspectorFrame | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockDetails:
    """Answer to the utility call `inspect_block`.

    Args:
        block_hash: In hexadecimal, without the group; None where the block is not cached.
        first_token_idx: Position of its first token in the request; None where it is not known.
        token_ids: None where they were not asked for, or are not known: the content was cached
            before somebody looked, and nobody holds it.
    """

    block_id: int
    ref_cnt: int
    state: BlockState
    block_hash: str | None
    group_id: int | None
    num_hits: int
    first_token_idx: int | None
    token_ids: list[int] | None
