"""`Replica`: the state of one engine replica, derived from its messages."""

import dataclasses
from collections.abc import Sequence
from typing import Self

import msgspec

from paxkv.contracts.engine_output import EngineDead, SchedulerStats, StepOutputs
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.engine_start import EngineReady
from paxkv.contracts.wire import LoopTransport
from paxkv.errors import EngineDeadError
from paxkv.fleet.stats_sum import add_counters, keep_expert_tokens


@dataclasses.dataclass(slots=True)
class Replica:
    """One engine, and the engines that replace it after its death.

    Args:
        stats: `own_stats` plus `counted_before`.
        own_stats: The last statistics that the current engine reported.
        counted_before: Counters of the engines that died in this replica.
        ended: The `EngineDead` of the last engine; None while an engine runs.
        requests: Unfinished request id -> whether it keeps its blocks after its end.
        kept_ids: Finished requests that keep their blocks for forks.
    """

    transport: LoopTransport
    ready: EngineReady
    stats: SchedulerStats
    own_stats: SchedulerStats
    counted_before: SchedulerStats = SchedulerStats()
    ended: EngineDead | None = None
    requests: dict[str, bool] = dataclasses.field(default_factory=dict)
    kept_ids: set[str] = dataclasses.field(default_factory=set)

    @classmethod
    def from_ready(cls, transport: LoopTransport, ready: EngineReady) -> Self:
        """Makes a replica whose first engine is ready."""
        return cls(transport, ready, ready.stats, ready.stats)

    @property
    def is_alive(self) -> bool:
        return self.ended is None

    def send(self, message: EngineInput) -> bool:
        """Sends a message to the engine; False if it has ended."""
        try:
            self.transport.send(message)
        except EngineDeadError:
            return False
        return True

    def holds_blocks_of(self, request_id: str | None) -> bool:
        """Whether the replica runs a request or keeps its blocks."""
        return request_id in self.requests or request_id in self.kept_ids

    def remove(self, request_ids: Sequence[str]) -> list[str]:
        """Removes aborted requests; returns the ids of the requests that this replica had."""
        own_ids = [request_id for request_id in request_ids if self.holds_blocks_of(request_id)]
        for request_id in own_ids:
            self.requests.pop(request_id, None)
            self.kept_ids.discard(request_id)
        return own_ids

    def record_finished(self, step: StepOutputs) -> None:
        """Removes the requests that a step finished. Records which of them keep their blocks."""
        for output in step.outputs:
            if output.finish_reason is not None and self.requests.pop(output.request_id, False):
                self.kept_ids.add(output.request_id)

    def update_stats(self, stats: SchedulerStats) -> None:
        """Stores statistics that the engine reported."""
        self.own_stats = keep_expert_tokens(stats, self.own_stats)
        self.stats = add_counters(self.own_stats, self.counted_before)

    def record_end(self, dead: EngineDead) -> tuple[str, ...]:
        """Records the engine's death; returns the requests that ended with it.

        Resets the gauges of `stats`; the counters stay.
        """
        request_ids = tuple(self.requests)
        self.ended = dead
        nothing = SchedulerStats(engine_start_time=self.stats.engine_start_time)
        self.stats = add_counters(nothing, self.stats)
        self.requests.clear()
        self.kept_ids.clear()
        return request_ids

    def record_successor(self, ready: EngineReady) -> None:
        """Records that another engine is ready. Its counters are added to the dead engine's."""
        before = add_counters(SchedulerStats(), self.stats)
        self.counted_before = msgspec.structs.replace(
            before, num_replaced_engines=before.num_replaced_engines + 1
        )
        self.update_stats(ready.stats)
        self.ready, self.ended = ready, None
