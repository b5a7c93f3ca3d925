"""`FrameMaker`: makes frames of a scheduler and its blocks: snapshots and deltas."""

import sys
from collections.abc import Sequence
from itertools import islice

from paxkv.contracts.observation import (
    BlockDetails,
    BlockState,
    GroupInfo,
    InspectionCounters,
    InspectorFrame,
    PoolInfo,
    RequestInfo,
)
from paxkv.errors import InvalidRequestError
from paxkv.inspector.block_columns import make_columns
from paxkv.inspector.block_tables import SentTables, TableChangeLists
from paxkv.inspector.inspected_scheduler import InspectedScheduler
from paxkv.inspector.step_meter import StepMeter
from paxkv.kv_cache.hashing.block_hash import get_block_hash, get_group_id, with_block_size
from paxkv.kv_cache.observers.block_changes import BlockChangeLog
from paxkv.kv_cache.pool.block import KVCacheBlock
from paxkv.scheduler.request import Request

MAX_WAITING_ROWS = 200
NUM_EVICTION_HEAD = 64
# Blocks per frame whose old content is looked up. Requests may hold the whole pool at the start.
MAX_LEARNED_PER_FRAME = 1000


class FrameMaker:
    """Records changes of a scheduler's state from its construction until `close`.

    Args:
        keeps_tokens: Store the tokens of blocks that are cached from now on, so that
            `describe_block` returns them after the requests that held the blocks have ended.

    Attributes:
        meter: The caller reports arrivals and steps to it.
    """

    def __init__(self, scheduler: InspectedScheduler, *, keeps_tokens: bool = False) -> None:
        self._scheduler = scheduler
        manager = scheduler.kv_cache_manager
        self._managers = manager.coordinator.single_type_managers
        self._pool = manager.block_pool
        self._prefix_cache_stats = manager.prefix_cache_stats
        self._log = BlockChangeLog(self._pool.blocks, keeps_tokens=keeps_tokens)
        self._pool.add_observer(self._log)
        self.meter = StepMeter()
        self._tables = tuple(SentTables(group) for group in self._managers)
        # Request id -> key. Ids may be reused; keys are not.
        self._keys: dict[str, int] = {}
        # Key -> id and request; None if only the kept blocks of the request remain.
        self._seen: dict[int, tuple[str, Request | None]] = {}
        self._num_keys = 0
        # Keys of requests whose id a newer request has.
        self._old_keys: list[int] = []
        self._new_requests: list[RequestInfo] = []
        # (key, group) -> index of the first block in the table whose content may be unknown to the
        # log, because it was cached before the recording started.
        self._to_learn: dict[tuple[int, int], int] = {}

    def close(self) -> None:
        """Stops the recording."""
        self._pool.remove_observer(self._log)

    def make_delta(self, at_s: float) -> InspectorFrame:
        """Makes a frame of the changes since the last frame."""
        return self._make_frame(at_s, is_snapshot=False)

    def make_snapshot(self, at_s: float) -> InspectorFrame:
        """Makes a frame of the complete state; the next delta starts from it."""
        self._new_requests = [_describe(key, *seen) for key, seen in self._seen.items()]
        for sent in self._tables:
            sent.reset()
        return self._make_frame(at_s, is_snapshot=True)

    def describe_block(self, block_id: int, holder_key: int, *, with_tokens: bool) -> BlockDetails:
        """Describes the current state of a block.

        Args:
            holder_key: Key of a request that the caller believes to hold the block; 0 if unknown.

        Raises:
            InvalidRequestError: There is no such block.
        """
        if not 0 <= block_id < self._pool.num_blocks:
            raise InvalidRequestError(
                f"{block_id=} must be in [0, {self._pool.num_blocks}).", param="block_id"
            )
        block = self._pool.blocks[block_id]
        key = block.block_hash
        first_token_idx, token_ids = self._find_tokens(block, holder_key)
        return BlockDetails(
            block_id=block_id,
            ref_cnt=block.ref_cnt,
            state=_state(block),
            block_hash=None if key is None else get_block_hash(key).hex(),
            group_id=None if key is None else get_group_id(key),
            num_hits=int(self._log.num_hits[block_id]),
            first_token_idx=first_token_idx,
            token_ids=list(token_ids) if with_tokens and token_ids is not None else None,
        )

    def _make_frame(self, at_s: float, *, is_snapshot: bool) -> InspectorFrame:
        scheduler, log = self._scheduler, self._log
        tables = TableChangeLists()
        for sent in self._tables:
            sent.collect_changes(self._key_of_holder, log.replaced_req_ids, tables)
        # If no block was shared, tables grew only by new blocks, whose content the log knows.
        if is_snapshot or log.has_shared:
            for key, group_id, _, num_kept, _ in zip(*[iter(tables.rows)] * 5, strict=True):
                table = (key, group_id)
                self._to_learn[table] = min(num_kept, self._to_learn.get(table, sys.maxsize))
        if not is_snapshot:  # only deltas reach all pages
            self._learn_contents()
        changed_np = log.drain_changed(tables.new_blocks)
        running = self._running_rows()
        waiting = self._waiting_rows()
        return InspectorFrame(
            pool=self._pool_info() if is_snapshot else None,
            at_s=at_s,
            blocks=make_columns(log, None if is_snapshot else changed_np),
            tables=tables.encode(),
            gone_keys=self._pop_gone_keys(),
            running=running,
            waiting=waiting,
            num_waiting=len(scheduler.waiting),
            new_requests=self._pop_new_requests(),
            eviction_head=[
                block.block_id for block in self._pool.free_block_queue.get_first(NUM_EVICTION_HEAD)
            ],
            num_free_blocks=self._pool.get_num_free_blocks(),
            counters=self._count(),
            ttft_s=self.meter.pop_ttfts(scheduler.requests),
        )

    def _running_rows(self) -> list[int]:
        rows: list[int] = []
        for request in self._scheduler.running:
            rows += (
                self._key_of(request.request_id, request),
                len(request.all_token_ids),
                request.num_computed_tokens,
                request.num_cached_tokens,
                request.num_preemptions,
            )
        return rows

    def _waiting_rows(self) -> list[int]:
        rows: list[int] = []
        for request in islice(self._scheduler.waiting, MAX_WAITING_ROWS):
            rows += (
                self._key_of(request.request_id, request),
                len(request.all_token_ids),
                int(request.status),
                request.num_preemptions,
            )
        return rows

    def _key_of_holder(self, request_id: str) -> int:
        return self._key_of(request_id, self._scheduler.requests.get(request_id))

    def _key_of(self, request_id: str, request: Request | None) -> int:
        key = self._keys.get(request_id)
        if key is not None:
            # None: the request has ended but keeps its blocks for forks.
            if request is None or self._seen[key][1] is request:
                return key
            self._old_keys.append(key)
        self._num_keys += 1
        self._keys[request_id] = self._num_keys
        self._seen[self._num_keys] = (request_id, request)
        self._new_requests.append(_describe(self._num_keys, request_id, request))
        return self._num_keys

    def _pop_new_requests(self) -> list[RequestInfo]:
        new_requests, self._new_requests = self._new_requests, []
        return new_requests

    def _pop_gone_keys(self) -> list[int]:
        gone, self._old_keys = self._old_keys, []
        requests = self._scheduler.requests
        for request_id in [request_id for request_id in self._keys if request_id not in requests]:
            if not any(request_id in manager.req_to_blocks for manager in self._managers):
                gone.append(self._keys.pop(request_id))
        for key in gone:
            del self._seen[key]
        return gone

    def _learn_contents(self) -> None:
        """Reports to the log what blocks contain that were cached before the recording started."""
        num_left = MAX_LEARNED_PER_FRAME
        while self._to_learn and num_left > 0:
            (key, group_id), first_block_idx = self._to_learn.popitem()
            _, request = self._seen.get(key, ("", None))
            if request is None or not request.block_hashes:
                continue
            log, manager = self._log, self._managers[group_id]
            hashes = with_block_size(
                request.block_hashes,
                self._scheduler.kv_cache_manager.hash_block_size,
                manager.block_size,
            )
            table = manager.get_blocks(request.request_id)
            end = min(len(table), len(hashes), first_block_idx + num_left)
            log.on_seen(
                request, table[first_block_idx:end], first_block_idx, hashes, manager.block_size
            )
            num_left -= max(end - first_block_idx, 1)
            if end < min(len(table), len(hashes)):
                self._to_learn[key, group_id] = end

    def _find_tokens(
        self, block: KVCacheBlock, holder_key: int
    ) -> tuple[int | None, Sequence[int] | None]:
        depth = int(self._log.contents["depth"][block.block_id])
        _, request = self._seen.get(holder_key, ("", None))
        for manager in self._managers if request is not None else ():
            table = manager.get_blocks(request.request_id)
            if block in table:
                if not manager.holds_tokens:
                    return None, None
                start = table.index(block) * manager.block_size
                return start, request.all_token_ids[start : start + manager.block_size]
        if depth == 0 or block.block_hash is None:
            return None, None
        block_size = self._managers[get_group_id(block.block_hash)].block_size
        return (depth - 1) * block_size, self._log.token_ids.get(block.block_id)

    def _pool_info(self) -> PoolInfo:
        scheduler = self._scheduler
        config = scheduler.scheduler_config
        return PoolInfo(
            num_blocks=self._pool.num_blocks,
            groups=[
                GroupInfo(
                    kind=manager.kv_cache_spec.kind,
                    block_size=manager.block_size,
                    window=getattr(manager.kv_cache_spec, "sliding_window", None),
                )
                for manager in self._managers
            ],
            permanent_block_ids=[
                block.block_id
                for manager in self._managers
                for block in manager.get_permanent_blocks()
            ],
            enable_prefix_caching=scheduler.kv_cache_manager.enable_caching,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_model_len=scheduler.max_model_len,
        )

    def _count(self) -> InspectionCounters:
        meter, stats = self.meter, self._prefix_cache_stats
        return InspectionCounters(
            num_steps=meter.num_steps,
            num_scheduled_tokens=self._scheduler.num_scheduled_tokens,
            num_output_tokens=meter.num_output_tokens,
            host_s=meter.host_s,
            device_s=meter.device_s,
            num_preemptions=self._scheduler.num_preemptions,
            num_evictions=self._log.num_evictions,
            num_draft_tokens=self._scheduler.draft_counts.num_draft_tokens,
            num_accepted_tokens=self._scheduler.draft_counts.num_accepted_tokens,
            prefix_cache_queries=stats.num_queries,
            prefix_cache_hits=stats.num_hits,
        )


def _state(block: KVCacheBlock) -> BlockState:
    if block.is_null:
        return "null"
    if block.ref_cnt == 0:
        return "free" if block.block_hash is None else "cached"
    return "used" if block.ref_cnt == 1 else "shared"


def _describe(key: int, request_id: str, request: Request | None) -> RequestInfo:
    if request is None:
        return RequestInfo(key=key, request_id=request_id)
    return RequestInfo(
        key=key,
        request_id=request_id,
        num_prompt_tokens=request.num_prompt_tokens,
        max_num_tokens=request.max_num_tokens,
        priority=request.priority,
        arrival_time=request.arrival_time,
    )
