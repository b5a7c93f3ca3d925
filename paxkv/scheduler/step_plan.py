"""StepPlan: collects the decisions of one step and builds its `SchedulerOutput`."""

from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.kv_cache.manager import KVCacheBlocks, KVCacheManager
from paxkv.scheduler.participants.encoder_inputs import EncoderInputs
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.request import Request


class StepPlan:
    """The requests of one step, their numbers of tokens, and their blocks.

    `StepScheduler.schedule_running` writes `running`, `num_scheduled_tokens` and `token_budget`
    directly: one call per request would double the cost of its loop.

    Args:
        token_budget: Tokens that may still be scheduled in this step.
    """

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.num_decode_steps = 1
        self.slot_switches: dict[str, int] = {}
        self.spec_decode_tokens: dict[str, list[int]] = {}
        self.preempted_req_ids: set[str] = set()
        # Requests that ran before this step, in their order; new ones; resumed ones.
        self.running: dict[str, Request] = {}
        self.new: list[Request] = []
        self.resumed: list[Request] = []
        # Whether the connector had no answer yet when it was asked what it can load for a request.
        self.is_connector_undecided = False
        # The new blocks of running requests, and all blocks of admitted requests.
        self.blocks: dict[str, KVCacheBlocks] = {}

    def requests(self) -> dict[str, Request]:
        """All scheduled requests."""
        if not self.new and not self.resumed:
            return self.running
        admitted = (*self.resumed, *self.new)
        return self.running | {request.request_id: request for request in admitted}

    def is_admitted(self, request: Request) -> bool:
        """Whether the request starts or resumes in this step."""
        return any(admitted is request for admitted in (*self.new, *self.resumed))

    def add_admitted(
        self, request: Request, num_new_tokens: int, all_blocks: KVCacheBlocks, *, is_new: bool
    ) -> None:
        """Adds a request that starts (`is_new`), or one that resumes after a preemption."""
        (self.new if is_new else self.resumed).append(request)
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        self.blocks[request.request_id] = all_blocks

    def add_drafts(self, request: Request, num_new_tokens: int) -> None:
        """Schedules the drafts that fit among the request's `num_new_tokens`; drops the others.

        Drafts follow the request's tokens and its placeholders.
        """
        num_drafts = (
            request.num_computed_tokens
            + num_new_tokens
            - request.num_tokens
            - request.num_output_placeholders
        )
        if num_drafts > 0:
            self.spec_decode_tokens[request.request_id] = request.spec_token_ids[:num_drafts]
        request.spec_token_ids = []

    def add_preempted(self, request: Request) -> None:
        """Records a preemption, and takes back the request's tokens and blocks of this step."""
        req_id = request.request_id
        self.preempted_req_ids.add(req_id)
        if self.running.pop(req_id, None) is not None:
            self.token_budget += self.num_scheduled_tokens.pop(req_id)
            self.blocks.pop(req_id, None)
            self.spec_decode_tokens.pop(req_id, None)

    def build_new(self) -> list[NewRequestData]:
        """Full data of requests that the runner does not know yet."""
        return [
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=request.prompt_token_ids,
                sampling_params=request.sampling_params,
                block_ids=self.blocks[request.request_id].get_block_ids(),
                num_computed_tokens=request.num_computed_tokens,
                ending_token_ids=tuple(request.ending_token_ids),
                early_end_ids=request.early_end_ids,
                bad_words_token_ids=request.bad_words_token_ids,
                needs_grammar=request.needs_grammar,
                is_pooled=request.is_pooled,
                lora_name=request.lora_name,
                mm_features=request.mm_features,
            )
            for request in self.new
        ]

    def build_cached(self) -> CachedRequestData:
        """Updates of requests that the runner knows. Must be built before any of them advances."""
        cached = [*self.running.values(), *self.resumed]
        req_ids = [request.request_id for request in cached]
        return CachedRequestData(
            req_ids=req_ids,
            resumed_req_ids=frozenset(request.request_id for request in self.resumed),
            new_block_ids=self._new_block_ids(req_ids),
            num_computed_tokens=[request.num_computed_tokens for request in cached],
            num_output_tokens=[
                len(request.all_token_ids)
                - request.num_prompt_tokens
                + request.num_output_placeholders
                for request in cached
            ],
            all_token_ids={
                request.request_id: request.all_token_ids.copy() for request in self.resumed
            },
        )

    def build_output(
        self,
        requests: dict[str, Request],
        *,
        manager: KVCacheManager,
        encoder_inputs: EncoderInputs,
        remote_kv: RemoteKV | None,
        reset_req_ids: set[str],
        finished_req_ids: set[str],
        num_common_prefix_blocks: list[int],
    ) -> SchedulerOutput:
        """Builds the message to the runner; drains what the other components collected for it.

        Args:
            requests: The result of `StepPlan.requests`.
            reset_req_ids: Requests preempted by a reset, or by a failed load, since the last step.
            finished_req_ids: Requests that ended since the last step.
        """
        manager.finish_step()
        return SchedulerOutput(
            scheduled_new_reqs=self.build_new(),
            scheduled_cached_reqs=self.build_cached(),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            preempted_req_ids=frozenset(self.preempted_req_ids | reset_req_ids),
            finished_req_ids=frozenset(finished_req_ids),
            num_decode_steps=self.num_decode_steps,
            scheduled_spec_decode_tokens=self.spec_decode_tokens,
            scheduled_encoder_inputs=encoder_inputs.drain_scheduled(),
            free_encoder_mm_hashes=encoder_inputs.cache_manager.drain_freed_identifiers(),
            num_common_prefix_blocks=num_common_prefix_blocks,
            block_copies=manager.drain_block_copies(),
            slot_switches=self.slot_switches,
            kv_connector_metadata=(
                None
                if remote_kv is None
                else remote_kv.build_metadata(self.num_scheduled_tokens, requests)
            ),
        )

    def _new_block_ids(self, req_ids: list[str]) -> list[tuple[list[int], ...] | None]:
        if not self.blocks:
            return [None] * len(req_ids)
        found = map(self.blocks.get, req_ids)
        return [None if blocks is None else blocks.get_block_ids() for blocks in found]
