"""Observations of an engine: KV events, block residency, cache misses, inspector frames.

An inspector frame is a snapshot, or the changes since the previous frame. Its arrays are
little-endian bytes, encoded as base64 in JSON.
"""

import dataclasses
from typing import Literal

# A receiver that adds the hashes of `BlockStored` to a set, and deletes the hashes of
# `BlockRemoved`, has the set of all cached hashes. If several blocks have the same hash, it is
# reported once as stored, and as removed when the last of them is evicted.


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheEvent:
    """Base class of KV cache events. `paxkv.engine.kv_event_formats` defines what is sent."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored(KVCacheEvent):
    """Consecutive blocks of one request entered the prefix cache.

    Args:
        block_hashes: Hashes of the blocks, in order, without group id.
        parent_block_hash: Hash of the block before the first one; None at the start of a prompt.
            That block may have been evicted.
        token_ids: Tokens of all the blocks.
        block_size: Tokens per block.
        lora_name: LoRA adapter with which the blocks were computed.
        group_id: KV cache group.
        kind: `KVCacheSpec.kind` of the group.
        sliding_window: Of a group that keeps only the blocks of a window.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_name: str | None
    group_id: int
    kind: str
    sliding_window: int | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved(KVCacheEvent):
    """Hashes left the prefix cache: their blocks were allocated again, or removed as invalid.

    A block that is only freed stays in the prefix cache.
    """

    block_hashes: list[bytes]
    group_id: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllBlocksCleared(KVCacheEvent):
    """The prefix cache was emptied."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVEventBatch:
    """Events of one step.

    Args:
        ts: Seconds since the epoch.
    """

    ts: float
    events: list[KVCacheEvent]


# Upper bounds of all buckets except the last, which has none. A block may live for milliseconds in
# a full pool, or for an hour in an idle one.
RESIDENCY_BUCKETS_S = (
    (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
    + (10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
)  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyHistogram:
    """Durations in seconds, counted since the start.

    Args:
        bucket_counts: Number of durations in each bucket of `RESIDENCY_BUCKETS_S` (not
            cumulative), then of longer ones.
        sum_s: Sum of all durations.
    """

    bucket_counts: tuple[int, ...] = (0,) * (len(RESIDENCY_BUCKETS_S) + 1)
    sum_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockResidency:
    """Durations of a random sample of allocated blocks.

    Args:
        lifetime: From the allocation until the content is evicted or overwritten.
        idle_before_evict: From the release by the last request to the end of the lifetime.
        reuse_gap: From an allocation or a hit to the next hit.
    """

    lifetime: ResidencyHistogram = ResidencyHistogram()
    idle_before_evict: ResidencyHistogram = ResidencyHistogram()
    reuse_gap: ResidencyHistogram = ResidencyHistogram()


# hit                  the longest possible hit was found (the last token is always computed)
# disabled             caching is off, or the request asked not to read the cache
# too_short            the prompt has no full block before its last token
# evicted              the block was cached, and was evicted to make room
# salt                 the first block is cached under another salt, or without one
# lora                 the first block is cached for another adapter, or for none
# first_block_differs  no cached prompt begins with the same block
# block_differs        the tokens that all groups have cached end, or differ, at `block_idx`
# state_not_saved      more keys and values are cached than were found, but no state was saved
#                      after the tokens of `block_idx`
# shortened            more tokens are cached than were found. With `block_idx`: one group lacks
#                      this block, which a longer hit needs. Without: every group has the blocks,
#                      but a hit cannot end there
MissReason = Literal[
    "hit",
    "disabled",
    "too_short",
    "evicted",
    "salt",
    "lora",
    "first_block_differs",
    "block_differs",
    "state_not_saved",
    "shortened",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheMiss:
    """Explains the prefix cache look-up of one request.

    Args:
        num_tokens: Tokens that were looked up.
        num_hit_tokens: Tokens that were found, in [0, num_tokens - 1].
        block_idx: The missing block that kept the hit from being longer, counted in blocks of
            `block_size`; None if no block was missing.
        block_size: Tokens of that block, which is the block size of its KV cache group.
        kind: Kind of that group, as in `KVCacheSpec.kind`.
    """

    request_id: str
    reason: MissReason
    num_tokens: int
    num_hit_tokens: int = 0
    block_idx: int | None = None
    block_size: int | None = None
    kind: str | None = None


# The inspector's page receives this many bytes of a block's hash. JavaScript numbers represent
# integers of 6 bytes exactly.
HASH_BYTES = 6

BlockState = Literal["free", "cached", "used", "shared", "null"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockColumns:
    """Blocks as columns of equal lengths.

    Args:
        block_ids: u32 each; None for all blocks of the pool, in order.
        ref_counts: u16 each; larger counts are shown as 65535.
        hashes: `HASH_BYTES` of the content's hash each; zeros if the block is not cached.
        parents: `HASH_BYTES` of the previous block's hash each; zeros if there is none, or if it
            is not known.
        depths: u16 each: index of the content in a block table, plus 1; 0 if it is not known.
        groups: u8 each: KV cache group of the content.
        num_hits: u16 each: number of hits of the content since the inspector was opened.
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
    """Changed block tables, each of one request in one group.

    A table consists of `num_skipped` null blocks, unchanged blocks with indices in
    `[num_skipped, num_kept)`, and `num_new` new blocks.

    Args:
        rows: Rows of (key, group, `num_skipped`, `num_kept`, `num_new`), concatenated. For keys see
            `RequestInfo`.
        new_block_ids: u32 each; new blocks of all tables, concatenated.
    """

    rows: list[int]
    new_block_ids: bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestInfo:
    """The constant attributes of a request.

    Args:
        key: Identifies the request in all frames; never reused.
        num_prompt_tokens: This and the fields below are 0 if only the request's blocks remain.
        max_num_tokens: Number of prompt and output tokens at which the request ends.
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
    """A KV cache group. `kind` is its spec's; `window` is None without a window."""

    kind: str
    block_size: int
    window: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolInfo:
    """The constant attributes of a pool.

    Args:
        permanent_block_ids: Blocks that layers hold, independently of requests.
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
    """Counts since the inspector was opened; of preemptions, drafts and hits since the start.

    Args:
        num_evictions: Blocks that lost their content.
        num_draft_tokens: Drafts that were verified.
        num_accepted_tokens: Drafts that were accepted.
        host_s: Total seconds that the host worked on steps.
        device_s: Total seconds that the host waited for the device.
    """

    num_steps: int = 0
    num_scheduled_tokens: int = 0
    num_output_tokens: int = 0
    host_s: float = 0.0
    device_s: float = 0.0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InspectorFrame:
    """A snapshot, or the changes since the previous frame.

    Args:
        pool: Set only in a snapshot.
        at_s: Seconds since the epoch; in a replayed trace, since its start.
        blocks: Changed blocks; all blocks in a snapshot.
        tables: Changed block tables; for new requests, the full tables.
        new_requests: Requests that are not in any previous frame; all requests in a snapshot.
        gone_keys: Requests that have ended and hold no blocks any more.
        running: Rows of (key, tokens, computed tokens, cached prompt tokens, preemptions), in the
            order of scheduling, concatenated.
        waiting: Rows of (key, tokens, status, preemptions), at most `MAX_WAITING_ROWS` of them.
        num_waiting: Number of waiting requests.
        eviction_head: Ids of the free blocks that are allocated next.
        num_free_blocks: Number of free blocks.
        ttft_s: Times to first token of requests that got it since the previous frame.
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
        seq: Sequence number that the caller must pass in the next call.
        took_s: Processor time of the engine for this call, in seconds.
        snapshot: Set if the caller asked for it or has missed a frame.
        delta: None if the caller has missed a frame.
    """

    seq: int
    took_s: float
    snapshot: InspectorFrame | None
    delta: InspectorFrame | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockDetails:
    """Answer to the utility call `inspect_block`.

    Args:
        block_hash: In hexadecimal, without the group; None if the block is not cached.
        first_token_idx: Position of the block's first token in the request; None if not known.
        token_ids: None if not requested or not known. They are not known if the block was cached
            before the inspector was opened and no request holds it.
    """

    block_id: int
    ref_cnt: int
    state: BlockState
    block_hash: str | None
    group_id: int | None
    num_hits: int
    first_token_idx: int | None
    token_ids: list[int] | None
