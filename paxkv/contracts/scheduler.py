"""Protocol between the engine core and the scheduler that decides its steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason, SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_events import KVCacheEvent
from paxkv.contracts.prefix_cache_miss import PrefixCacheMiss
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput


class ScheduledRequest(Protocol):
    """What the engine core reads of an unfinished request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V the steps sent off so far compute."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache at the first admission."""
        ...

    @property
    def needs_grammar(self) -> bool: ...

    @property
    def is_streamed(self) -> bool: ...


class Scheduler(Protocol):
    """Decides which requests compute how many tokens in each step.

    `update_from_output` is called once for each `schedule`, in the same order; a further step may
    be scheduled before the last one has come back.
    """

    @property
    def requests(self) -> Mapping[str, ScheduledRequest]:
        """Unfinished requests by id."""
        ...

    @property
    def running(self) -> Sequence[ScheduledRequest]:
        """Unfinished requests that were admitted, in the order of admission."""
        ...

    def add_request(self, request: EngineRequest) -> None:
        """Takes in a request.

        Raises:
            InvalidRequestError: The scheduler cannot run it to its end.
        """
        ...

    def finish_requests(
        self, request_ids: Iterable[str], finish_reason: FinishReason = "abort"
    ) -> None:
        """Ends requests at once; unknown ids are ignored."""
        ...

    def has_unfinished_requests(self) -> bool: ...

    def num_unfinished_requests(self) -> int: ...

    def has_finished_requests(self) -> bool:
        """Whether requests ended that the runner does not know of yet."""
        ...

    def is_waiting_for_outside(self) -> bool:
        """Whether the last `schedule` may have found no work because something is on its way."""
        ...

    def schedule(self, max_decode_steps: int = 1) -> SchedulerOutput:
        """Decides one step, or a burst of up to `max_decode_steps` decode steps."""
        ...

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Appends the tokens of a step and ends the requests that they end."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forgets every cached block; False, and nothing changed, while requests hold blocks."""
        ...

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call, in order; none unless they are enabled."""
        ...

    def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Why a request did not find more of its prompt in the prefix cache.

        Raises:
            InvalidRequestError: There is no such request, nor was one admitted lately.
        """
        ...

    def make_stats(self, *, count_slots: bool = True) -> SchedulerStats:
        """A snapshot of the scheduler's counters.

        Args:
            count_slots: Count used KV slots anew; else repeat the last count.
        """
        ...

    def check_invariants(self) -> None:
        """Checks the scheduler's state.

        Raises:
            InvariantError: A rule is broken.
        """
        ...

    def close(self) -> None:
        """Ends the scheduler; nothing may be called afterwards. May be repeated."""
        ...
