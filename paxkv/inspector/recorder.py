"""InspectionRecorder: what an engine does, as frames, while somebody asks for them."""

import secrets
import time
from collections.abc import Callable, Sequence
from itertools import islice

from paxkv.contracts.engine_output import EngineCoreOutput
from paxkv.contracts.inspection import (
    BlockDetails,
    GroupInfo,
    Inspection,
    InspectionCounters,
    InspectorFrame,
    PoolInfo,
    RequestInfo,
)
from paxkv.errors import InvalidRequestError
from paxkv.inspector.block_columns import make_columns
from paxkv.inspector.block_tables import SentTables
from paxkv.inspector.step_meter import StepMeter
from paxkv.kv_cache.block import KVCacheBlock
from paxkv.kv_cache.block_changes import BlockChangeLog
from paxkv.kv_cache.block_hash import get_block_hash, with_block_size
from paxkv.scheduler.request import Request
from paxkv.scheduler.scheduler import Scheduler
from paxkv.scheduler.trace.recorder import TraceRecorder

# Without a question for so long, nobody looks any more: a page that vanished costs nothing.
LEASE_S = 3.0
MAX_WAITING_ROWS = 200
NUM_EVICTION_HEAD = 64


class InspectionRecorder:
    """Looks at a scheduler and its blocks; collects nothing while nobody asks.

    Args:
        clock: Seconds since the epoch.
    """

    def __init__(
        self, scheduler: Scheduler | TraceRecorder, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._scheduler = scheduler
        self._clock = clock
        manager = scheduler.kv_cache_manager
        self._managers = manager.coordinator.single_type_managers
        self._pool = manager.block_pool
        self._prefix_cache_stats = manager.prefix_cache_stats
        # None while nobody looks.
        self._log: BlockChangeLog | None = None
        self._meter = StepMeter()
        self._lease_end_s = 0.0
        self._tables = tuple(SentTables(group) for group in self._managers)
        # Ids may be used again, keys are not. No request: only its blocks are left.
        self._keys: dict[str, int] = {}
        self._seen: dict[int, tuple[str, Request | None]] = {}
        self._num_keys = 0
        self._new_requests: list[RequestInfo] = []
        # A frame of an engine that was built anew must not look like the next one of the old.
        self._seq = secrets.randbits(32)

    @property
    def is_active(self) -> bool:
        return self._log is not None

    def on_arrival(self, request_id: str, arrival_time: float) -> None:
        """A request was taken in."""
        if self._log is not None:
            self._meter.on_arrival(request_id, arrival_time)

    def on_step(
        self, outputs: Sequence[EngineCoreOutput], *, took_s: float, wait_s: float
    ) -> None:
        """A step came home; with `wait_s` of `took_s` the host only waited for the device."""
        if self._log is None:
            return
        now_s = self._clock()
        self._meter.on_step(outputs, took_s=took_s, wait_s=wait_s, now_s=now_s)
        if time.monotonic() > self._lease_end_s:
            self._stop()

    def inspect(self, after_seq: int, wants_snapshot: bool) -> Inspection:
        """What changed since the call that answered `after_seq`, or everything.

        Whoever asks first, or missed an answer, gets a snapshot. Collecting goes on for
        `LEASE_S` after each call.
        """
        start_s = time.perf_counter()
        is_next = self._log is not None and after_seq == self._seq
        self._seq += 1
        self._lease_end_s = time.monotonic() + LEASE_S
        if self._log is None:
            self._start()
        delta = self._make_frame(is_snapshot=False) if is_next else None
        snapshot = None
        if wants_snapshot or not is_next:
            snapshot = self._make_frame(is_snapshot=True)
        return Inspection(
            seq=self._seq,
            took_s=time.perf_counter() - start_s,
            snapshot=snapshot,
            delta=delta,
        )

    def inspect_block(self, block_id: int, holder_key: int, with_tokens: bool) -> BlockDetails:
        """One block as it is now.

        Args:
            holder_key: Of a request that holds it, as far as the caller knows; else 0.

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
            group_id=None if key is None else key[-1],
            num_hits=0 if self._log is None else self._log.num_hits.get(block_id, 0),
            first_token_idx=first_token_idx,
            token_ids=list(token_ids) if with_tokens and token_ids is not None else None,
        )

    def _start(self) -> None:
        self._log = self._pool.change_log = BlockChangeLog()
        self._meter = StepMeter()

    def _stop(self) -> None:
        self._log = self._pool.change_log = None
        self._keys.clear()
        self._seen.clear()
        self._new_requests.clear()
        for tables in self._tables:
            tables.forget_all()

    def _make_frame(self, *, is_snapshot: bool) -> InspectorFrame:
        scheduler, log = self._scheduler, self._log
        assert log is not None
        if is_snapshot:
            self._new_requests = [_describe(key, *seen) for key, seen in self._seen.items()]
            for sent in self._tables:
                sent.forget_all()
        changed, has_freed = log.take_changed()
        tables, holders = [], set()
        for sent in self._tables:
            table_changes, group_holders = sent.take_changes(self._key_of, has_freed=has_freed)
            tables += table_changes
            holders |= group_holders
        for change in tables:
            self._learn_origins(change.key, change.group_id, change.num_kept, changed)
        running = self._running_rows()
        waiting = self._waiting_rows()
        return InspectorFrame(
            pool=self._pool_info() if is_snapshot else None,
            at_s=self._clock(),
            blocks=make_columns(
                self._pool.blocks if is_snapshot else list(changed), log, is_all=is_snapshot
            ),
            tables=tables,
            gone_keys=self._take_gone(holders),
            running=running,
            waiting=waiting,
            num_waiting=len(scheduler.waiting),
            new_requests=self._take_new_requests(),
            eviction_head=[
                block.block_id
                for block in self._pool.free_block_queue.get_first(NUM_EVICTION_HEAD)
            ],
            num_free_blocks=self._pool.get_num_free_blocks(),
            counters=self._count(),
            ttft_s=self._meter.take_ttfts(scheduler.requests),
        )

    def _running_rows(self) -> list[int]:
        rows: list[int] = []
        for request in self._scheduler.running:
            rows += (
                self._key_of(request.request_id),
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
                self._key_of(request.request_id),
                len(request.all_token_ids),
                int(request.status),
                request.num_preemptions,
            )
        return rows

    def _key_of(self, request_id: str) -> int:
        request = self._scheduler.requests.get(request_id)
        key = self._keys.get(request_id)
        # A request that ended, and whose blocks stay for forks, is the one that had the id.
        if key is not None and (request is None or self._seen[key][1] is request):
            return key
        self._num_keys += 1
        self._keys[request_id] = self._num_keys
        self._seen[self._num_keys] = (request_id, request)
        self._new_requests.append(_describe(self._num_keys, request_id, request))
        return self._num_keys

    def _take_new_requests(self) -> list[RequestInfo]:
        taken, self._new_requests = self._new_requests, []
        return taken

    def _take_gone(self, holders: set[int]) -> list[int]:
        gone: list[int] = []
        for key, (request_id, _) in list(self._seen.items()):
            has_id = self._keys[request_id] == key
            if has_id and (request_id in self._scheduler.requests or key in holders):
                continue
            gone.append(key)
            del self._seen[key]
            if has_id:
                del self._keys[request_id]
        return gone

    def _learn_origins(
        self, key: int, group_id: int, first_block_idx: int, changed: set[KVCacheBlock]
    ) -> None:
        """Cached blocks that a request found, and that were cached before anybody looked."""
        _, request = self._seen[key]
        log, manager = self._log, self._managers[group_id]
        if request is None or log is None or not request.block_hashes:
            return
        hashes = with_block_size(
            request.block_hashes,
            self._scheduler.kv_cache_manager.hash_block_size,
            manager.block_size,
        )
        table = manager.get_blocks(request.request_id)
        for block_idx in range(first_block_idx, min(len(table), len(hashes))):
            block = table[block_idx]
            if block.block_hash is not None and block.block_id not in log.origins:
                log.learn_origin(request, block, block_idx, hashes, manager.block_size)
                changed.add(block)

    def _find_tokens(
        self, block: KVCacheBlock, holder_key: int
    ) -> tuple[int | None, Sequence[int] | None]:
        origin = None if self._log is None else self._log.origins.get(block.block_id)
        _, request = self._seen.get(holder_key, ("", None))
        for manager in self._managers if request is not None else ():
            table = manager.get_blocks(request.request_id)
            if block in table:
                start = table.index(block) * manager.block_size
                return start, request.all_token_ids[start : start + manager.block_size]
        if origin is None or block.block_hash is None:
            return None, None
        block_size = self._managers[block.block_hash[-1]].block_size
        return origin.block_idx * block_size, origin.token_ids

    def _pool_info(self) -> PoolInfo:
        scheduler = self._scheduler
        config = scheduler.scheduler_config
        return PoolInfo(
            num_blocks=self._pool.num_blocks,
            groups=[
                GroupInfo(
                    kind=type(manager.kv_cache_spec).__name__,
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
        meter, stats = self._meter, self._prefix_cache_stats
        return InspectionCounters(
            num_steps=meter.num_steps,
            num_scheduled_tokens=self._scheduler.num_scheduled_tokens,
            num_output_tokens=meter.num_output_tokens,
            host_s=meter.host_s,
            device_s=meter.device_s,
            num_finished=meter.num_finished,
            num_preemptions=self._scheduler.num_preemptions,
            num_evictions=0 if self._log is None else self._log.num_evictions,
            prefix_cache_queries=stats.num_queries,
            prefix_cache_hits=stats.num_hits,
        )


def _state(block: KVCacheBlock) -> str:
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
