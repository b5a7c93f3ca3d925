"""Protocols through which packages of the host half call each other without importing."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason, SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.observation import KVCacheEvent, PrefixCacheMiss
from paxkv.contracts.scheduler_output import (
    KVConnectorMetadata,
    ModelRunnerOutput,
    SchedulerOutput,
)


class CacheRequest(Protocol):
    """The attributes of a request that the KV cache reads. It never writes to a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens known so far."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of `all_token_ids`."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are in the request's blocks, counting steps in flight."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def state_save_at(self) -> int:
        """Tokens after which the state of recurrent layers is saved for other requests, or 0."""
        ...

    @property
    def num_leading_tokens(self) -> int:
        """See `EngineRequest`."""
        ...

    @property
    def keeps_state_for_forks(self) -> bool:
        """Whether requests will fork from this one while it runs."""
        ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hash of each full block of `hash_block_size` tokens; empty without caching."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether the whole prompt must be computed, even if parts of it are cached."""
        ...

    @property
    def lora_name(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


class GrammarGate(Protocol):
    """The component that compiles grammars while the engine runs steps."""

    def is_ready(self, request_id: str) -> bool:
        """Whether the request may run now. The scheduler asks in each step until this is True."""
        ...


class GrammarChecker(Protocol):
    """Checks whether grammars can be compiled."""

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """Whether the result of `check` is cached, so that it returns immediately."""
        ...

    def is_heavy(self, params: StructuredOutputsParams) -> bool:
        """Whether checking this grammar took longer than `check_quickly` waits."""
        ...

    def check_quickly(self, params: StructuredOutputsParams) -> bool:
        """Checks with a short timeout; False if the time was not enough.

        Raises:
            InvalidRequestError: As for `check`.
        """
        ...

    def check(self, params: StructuredOutputsParams) -> None:
        """Checks a grammar. Call it in a thread, because it may take seconds.

        Raises:
            InvalidRequestError: The grammar cannot be compiled; the message says why.
        """
        ...

    def ignored_keywords(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """The places of schema keywords that a checked grammar does not enforce."""
        ...

    def close(self) -> None:
        """Stops checking. Checks in progress raise EngineDeadError."""
        ...


class KVConnector(Protocol):
    """The scheduler's half of a connector. The engine's thread makes every call.

    Source: vLLM `distributed/kv_transfer/kv_connector/v1/base.py`.
    """

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Finds tokens after `num_computed_tokens` that the connector can load.

        Returns:
            Their number (None if the scheduler must ask again later), and whether the load is
            asynchronous. A synchronous load happens in the first step that schedules the request.
        """
        ...

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """Reports the request's blocks, into which `num_external_tokens` tokens will be loaded."""
        ...

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        """Returns this step's transfers and clears them.

        Args:
            num_computed_tokens_after_step: For each request scheduled in this step.
        """
        ...

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        """Reports a request's end. True keeps its blocks until `finished_sending` has its id."""
        ...


class ScheduledRequest(Protocol):
    """The attributes of an unfinished request that the engine core reads."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        ...

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose K and V are computed, counting steps in flight."""
        ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were already computed at the first admission."""
        ...

    @property
    def needs_grammar(self) -> bool: ...

    @property
    def is_streamed(self) -> bool: ...


class Scheduler(Protocol):
    """Decides which requests run in each step, and how many tokens they compute.

    The caller calls `update_from_output` once for each `schedule`, in the same order. It may
    schedule a step before the previous step has returned its tokens.
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
        """Adds a request to the waiting queue.

        Raises:
            InvalidRequestError: The request could never finish.
        """
        ...

    def finish_requests(
        self, request_ids: Iterable[str], finish_reason: FinishReason = "abort"
    ) -> None:
        """Ends requests immediately; unknown ids are ignored."""
        ...

    def has_unfinished_requests(self) -> bool: ...

    def num_unfinished_requests(self) -> int: ...

    def has_finished_requests(self) -> bool:
        """Whether the next step must report finished requests to the runner."""
        ...

    def may_schedule_nothing(self) -> bool:
        """Whether the last step may be empty, because requests wait for another component."""
        ...

    @property
    def is_waiting_for_drafts(self) -> bool:
        """Whether the next step should be decided only when no step is in flight."""
        ...

    def schedule(self, max_decode_steps: int = 1) -> SchedulerOutput:
        """Decides one step, or a burst of up to `max_decode_steps` decode steps."""
        ...

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Appends the tokens of a step, and ends the requests that these tokens finish."""
        ...

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache. While requests hold blocks, only returns False."""
        ...

    def drain_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call, in order; empty if events are disabled."""
        ...

    def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Explains why a request did not find more of its prompt in the prefix cache.

        Raises:
            InvalidRequestError: No unfinished or recently admitted request has this id.
        """
        ...

    def make_stats(self, *, count_slots: bool = True) -> SchedulerStats:
        """A snapshot of the scheduler's counters.

        Args:
            count_slots: Count used KV slots. If False, repeat the last count.
        """
        ...

    def check_invariants(self) -> None:
        """Checks the scheduler's state.

        Raises:
            InvariantError: A rule is broken.
        """
        ...

    def close(self) -> None:
        """Ends the scheduler. Afterwards only `close` may be called."""
        ...
