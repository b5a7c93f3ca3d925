"""Protocols of the host half, whose packages do not import each other."""

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
    """What the KV cache reads of a request; it never writes to one."""

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
        """Tokens whose K and V are in the request's blocks, by the steps sent off so far."""
        ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hash of each full `hash_block_size` of its tokens; empty without caching."""
        ...

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """True: compute the whole prompt, even where the cache has it."""
        ...

    @property
    def lora_name(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


class GrammarGate(Protocol):
    """Whoever compiles grammars beside the engine's steps."""

    def is_ready(self, request_id: str) -> bool:
        """Whether the request may run now; asked again in every step until it may."""
        ...


class GrammarChecker(Protocol):
    """Whoever knows which grammars can be compiled."""

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """Whether `check` answers at once."""
        ...

    def is_heavy(self, params: StructuredOutputsParams) -> bool:
        """Whether one that was checked took longer than `check_quickly` waits."""
        ...

    def check_quickly(self, params: StructuredOutputsParams) -> bool:
        """Gives up soon; False where that leaves it open whether `check` would pass.

        Raises:
            InvalidRequestError: As `check`.
        """
        ...

    def check(self, params: StructuredOutputsParams) -> None:
        """May take seconds: call it in a thread.

        Raises:
            InvalidRequestError: The grammar cannot be compiled; the message says why.
        """
        ...

    def ignored_keywords(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """The places of schema keywords that a grammar does not enforce, once it was checked."""
        ...

    def close(self) -> None:
        """Checks nothing more; who waits for a check gets EngineDeadError."""
        ...


class KVConnector(Protocol):
    """The scheduler's half of a connector; every call comes from the engine's thread.

    Source: vLLM `distributed/kv_transfer/kv_connector/v1/base.py`.
    """

    def get_num_new_matched_tokens(
        self, request: CacheRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens beyond `num_computed_tokens` that can be loaded from outside.

        Returns:
            Their number, or None when that is not known yet and the request is to be asked for
            again; and whether they are loaded while other steps run. A load that is not
            asynchronous is done by the step that the request is first scheduled in.
        """
        ...

    def update_state_after_alloc(
        self, request: CacheRequest, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """The request holds these blocks now; `num_external_tokens` are to be loaded into them."""
        ...

    def build_connector_meta(
        self, num_computed_tokens_after_step: dict[str, int]
    ) -> KVConnectorMetadata:
        """This step's transfers, and forgets them.

        Args:
            num_computed_tokens_after_step: Of each request scheduled in this step.
        """
        ...

    def request_finished(self, request: CacheRequest, block_ids: tuple[list[int], ...]) -> bool:
        """A request ended; True keeps its blocks until `finished_sending` names it."""
        ...


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
