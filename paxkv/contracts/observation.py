"""What can be observed of an engine: KV events, block residency, cache misses, inspector frames.

Inspector frames are the whole picture or what changed since the last one. Their arrays travel as
little-endian bytes, which JSON carries in base64: 100,000 blocks take a few milliseconds.
"""

import dataclasses
from typing import Literal

# A set to which the hashes of `BlockStored` are added, and from which those of `BlockRemoved` are
# taken, is what can be found: content that lies in several blocks is stored once, and removed with
# the last of them.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheEvent:
    """Base of all events. `paxkv.engine.kv_event_formats` has what subscribers get of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored(KVCacheEvent):
    """Consecutive blocks of one request became findable.

    Args:
        block_hashes: Of the blocks, in order; without group id.
        parent_block_hash: Of the block before the first; None at the start of a prompt. The block
            itself may be gone.
        token_ids: Tokens in all of them.
        block_size: Tokens a block.
        lora_name: Adapter that they were computed with.
        group_id: KV cache group.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    group_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved(KVCacheEvent):
    """Hashes that no block has any more: its memory was handed out again, or it was withdrawn.

    A block that is only freed stays findable.
    """

    block_hashes: list[bytes]
    group_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared(KVCacheEvent):
    """Nothing can be found any more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVEventBatch:
    """Events of one step.

    Args:
        ts: Seconds since the epoch.
    """

    ts: float
    events: list[KVCacheEvent]


# Upper bounds of all buckets but the last, which has none. A block may live for milliseconds in
# a full pool, or for an hour in an idle one.
RESIDENCY_BUCKETS_S = (
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    + (10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyHistogram:
    """Durations in seconds, counted since the start.

    Args:
        bucket_counts: Durations in each bucket alone, one more than `RESIDENCY_BUCKETS_S`.
        sum_s: Sum of all durations.
    """

    bucket_counts: tuple[int, ...] = (0,) * (len(RESIDENCY_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockResidency:
    """Of a sample of the blocks handed out.

    Args:
        lifetime: From being handed out until its content is forgotten or overwritten.
        idle_before_evict: The last part of that, in which nobody held it.
        reuse_gap: From one use to the next: from being handed out, or hit, to the next hit.
    """

    lifetime: ResidencyHistogram = ResidencyHistogram()
    idle_before_evict: ResidencyHistogram = ResidencyHistogram()
    reuse_gap: ResidencyHistogram = ResidencyHistogram()


# hit                  everything was found that can be: the last token is always computed
# disabled             caching is off, or the request asked not to read the cache
# too_short            the prompt has no full block before its last token
# evicted              the block was cached, and was evicted to make room
# salt                 the first block is cached under another salt, or without one
# lora                 the first block is cached for another adapter, or for none
# first_block_differs  no KV cache group has a prompt cached that begins like this one
# block_differs        what all groups have cached ends, or continues differently, at `block_idx`
# shortened            more tokens are cached than were found. With `block_idx`: one group lacks
#                      this block, which a longer hit needs. Without: no group lacks a block, but a
#                      hit cannot end there
MissReason = Literal[
    "hit",
    "disabled",
    "too_short",
    "evicted",
    "salt",
    "lora",
    "first_block_differs",
    "block_differs",
    "shortened",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheMiss:
    """The answer for one request.

    Args:
        num_tokens: Tokens that were looked up.
        num_hit_tokens: Tokens that were found, in [0, num_tokens - 1].
        block_idx: The missing block that kept the hit from being longer, counted in blocks of
            `block_size`; None if no block was missing.
        block_size: Tokens of that block, which is the block size of its KV cache group.
    """

    request_id: str
    reason: MissReason
    num_tokens: int
    num_hit_tokens: int = 0
    block_idx: int | None = None
    block_size: int | None = None


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
