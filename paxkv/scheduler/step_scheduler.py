"""StepScheduler: which requests get tokens in a step, running ones first, then waiting ones."""

import enum
from collections.abc import Collection

from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.admission import AdmissionGate, ComputedPrefix
from paxkv.scheduler.participants.encoder_inputs import EncoderDemand, EncoderInputs
from paxkv.scheduler.participants.invalid_blocks import (
    block_ids_from,
    can_continue_from,
    num_valid_tokens,
)
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.participants.spare_blocks import SpareBlocks
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.request_queue import RequestQueue
from paxkv.scheduler.step_plan import StepPlan
from paxkv.scheduler.steps_in_flight import StepsInFlight


class _Admission(enum.Enum):
    """The result of an attempt to admit the request in front of the waiting queue."""

    ADMITTED = enum.auto()
    # The request waits, but not for room. Later requests may be admitted before it.
    SKIPPED = enum.auto()
    # The step or the pool has no room for it. Later requests must not be admitted before it.
    NO_ROOM = enum.auto()


class StepScheduler:
    """Fills a `StepPlan`, and owns the list of running requests.

    Args:
        waiting: The scheduler's queue. Admission pops requests from it, preemption returns them.

    Attributes:
        running: Running requests in the order of admission. Only this class changes the list.
        num_preemptions: Preemptions since the start.
    """

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        num_lookahead_tokens: int,
        kv_cache_manager: KVCacheManager,
        encoder_inputs: EncoderInputs,
        spare_blocks: SpareBlocks,
        admission_gate: AdmissionGate,
        remote_kv: RemoteKV | None,
        steps_in_flight: StepsInFlight,
        waiting: RequestQueue,
    ) -> None:
        self._scheduler_config = scheduler_config
        self._num_lookahead_tokens = num_lookahead_tokens
        self._kv_cache_manager = kv_cache_manager
        self._encoder_inputs = encoder_inputs
        self._spare_blocks = spare_blocks
        self._admission_gate = admission_gate
        self._remote_kv = remote_kv
        self._steps_in_flight = steps_in_flight
        self._waiting = waiting
        self.running: list[Request] = []
        self.num_preemptions = 0

    def schedule_running(self, plan: StepPlan) -> None:
        """Schedules the next tokens of running requests; preempts requests when blocks run out.

        This loop is most of the host's cost of a decode step. Therefore it calls no function for a
        request that decodes one token in the middle of a block.
        """
        lookahead = self._num_lookahead_tokens
        num_scheduled_tokens, scheduled = plan.num_scheduled_tokens, plan.running
        token_budget = plan.token_budget
        # A copy, as preemption removes requests from the list during the loop.
        for request in self.running.copy():
            if token_budget == 0:
                break
            num_computed_tokens = request.num_computed_tokens
            if (
                num_computed_tokens + lookahead < request.num_plain_tokens
                and len(request.all_token_ids) + request.num_output_placeholders
                == num_computed_tokens + 1
                and not request.spec_token_ids
            ):
                req_id = request.request_id
                scheduled[req_id] = request
                num_scheduled_tokens[req_id] = 1
                token_budget -= 1
            # Otherwise an earlier request preempted it in this step.
            elif request.status is RequestStatus.RUNNING:
                plan.token_budget = token_budget
                self._schedule_one(request, plan)
                token_budget = plan.token_budget
        plan.token_budget = token_budget

    def _schedule_one(self, request: Request, plan: StepPlan) -> None:
        """Schedules the next tokens of one running request, within every limit."""
        num_new_tokens = len(request.all_token_ids) - request.num_computed_tokens
        demand = None
        # An unfinished request may always compute a single token.
        if num_new_tokens != 1 or request.spec_token_ids or request.mm_features:
            num_new_tokens, demand = self._cut_chunk(request, plan.token_budget)
            if num_new_tokens <= 0:
                return  # a step in flight still computes its next token
        num_slots = request.num_computed_tokens + num_new_tokens + self._num_lookahead_tokens
        if num_slots > request.max_tokens_before_allocate and not self._allocate_or_preempt(
            request, num_new_tokens, plan
        ):
            # vLLM ends the scan here. But later requests have work too, and blocks are free now.
            return
        req_id = request.request_id
        plan.running[req_id] = request
        plan.num_scheduled_tokens[req_id] = num_new_tokens
        plan.token_budget -= num_new_tokens
        if request.spec_token_ids:
            plan.add_drafts(request, num_new_tokens)
        if demand is not None:
            self._encoder_inputs.commit(request, demand)

    def _cut_chunk(self, request: Request, token_budget: int) -> tuple[int, EncoderDemand | None]:
        """Number of tokens that a running request may compute now, and items to encode for it."""
        if request.needs_grammar and request.num_output_placeholders > 0:
            return 0, None  # the grammar needs the unknown token to build the next mask
        num_computed_tokens = request.num_computed_tokens
        num_new_tokens = (
            request.num_tokens_with_spec + request.num_output_placeholders - num_computed_tokens
        )
        threshold = self._scheduler_config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # The last token of a request is sampled but never computed. So the limit is below
        # max_model_len, and drafts that could not be kept get no slots.
        num_new_tokens = min(
            num_new_tokens, token_budget, request.max_num_tokens - 1 - num_computed_tokens
        )
        num_new_tokens = self._kv_cache_manager.cut_at_save_point(
            *(request, num_computed_tokens, num_new_tokens),
            has_drafts=bool(request.spec_token_ids),
        )
        if num_new_tokens <= 0 or not request.mm_features:
            return num_new_tokens, None
        demand = self._encoder_inputs.fit(request, num_computed_tokens, num_new_tokens)
        return demand.num_new_tokens, demand

    def _allocate_or_preempt(self, request: Request, num_new_tokens: int, plan: StepPlan) -> bool:
        """Allocates blocks for a running request, preempting others; False if it was preempted."""
        manager = self._kv_cache_manager
        while request.status is RequestStatus.RUNNING:
            new_blocks = manager.allocate_slots(
                request, num_new_tokens, num_lookahead_tokens=self._num_lookahead_tokens
            )
            if new_blocks is not None:
                # With placeholders, `AsyncScheduler` caches a full block when its tokens are known.
                num_tokens = manager.get_max_tokens_before_allocate(
                    request,
                    are_cached_late=request.num_output_placeholders > 0,
                    is_step_decided=True,
                )
                request.set_tokens_before_allocate(num_tokens)
                if not new_blocks.is_empty():
                    plan.blocks[request.request_id] = new_blocks
                return True
            if self._spare_blocks.release_oldest_kept():
                continue
            # The only running request may lack blocks that were loaded for waiting requests.
            if len(self.running) == 1 and self._spare_blocks.drop_last_loaded(request):
                continue
            if self._scheduler_config.policy == "priority":
                victim = max(self.running, key=lambda running: running.sort_key)
                self.running.remove(victim)
            else:
                victim = self.running.pop()
            self.preempt(victim)
            plan.add_preempted(victim)
        return False

    def preempt(self, victim: Request) -> None:
        """Frees a request's blocks and returns it to the waiting queue, to be computed again.

        `num_computed_tokens` does not count this step yet. So `free` removes the blocks that the
        request got earlier in this step from the prefix cache. Tokens that steps in flight sample
        for the request are dropped; it samples them again.
        """
        # Tokens of a load that may still fail do not count. `free` removes their blocks from the
        # prefix cache: if the load fails later, no request holds them any more.
        victim.num_computed_tokens = self._steps_in_flight.num_sure_tokens(victim)
        self._kv_cache_manager.free(victim)
        self._encoder_inputs.release_preempted(victim)
        self._drop_next_tokens(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.prepend_request(victim)

    def preempt_running(self, victim: Request) -> None:
        """Preempts one running request between two steps."""
        self.running.remove(victim)
        self.preempt(victim)

    def preempt_all(self) -> list[Request]:
        """Preempts every running request; returns them.

        The last request is preempted first, so the queue keeps the order in which they ran.
        """
        victims = self.running[::-1]
        self.running.clear()
        for victim in victims:
            self.preempt(victim)
        return victims

    def remove_finished(self) -> None:
        """Removes finished requests from `running`."""
        self.running = [request for request in self.running if not request.is_finished]

    def recompute_invalid(self, invalid_block_ids: Collection[int]) -> set[str]:
        """Discards tokens that were computed from blocks that could not be loaded.

        A running request continues from its first invalid block if it can write into its own
        blocks there; otherwise it is preempted. A request whose load is still in progress loses
        the invalid tokens when the load ends.

        Returns:
            Ids of preempted requests, which the next step must report to the runner.
        """
        invalid = set(invalid_block_ids)
        victims: list[Request] = []
        # Requests are visited in the order of admission. Blocks that a request computed after an
        # invalid block are invalid too, also for later requests that share them.
        for request in (*self.running, *self._waiting):
            num_valid = num_valid_tokens(self._kv_cache_manager, request, invalid)
            if num_valid is None:
                continue
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
                self._remote_kv.record_invalid(request, num_valid)
                continue
            num_valid = min(num_valid, request.num_computed_tokens)
            invalid |= block_ids_from(self._kv_cache_manager, request, num_valid)
            request.num_computed_tokens = num_valid
            if request.status is not RequestStatus.RUNNING:
                self._spare_blocks.drop_loaded(request)
                continue
            self._drop_next_tokens(request)
            if not can_continue_from(self._kv_cache_manager, request, num_valid):
                victims.append(request)
        self._kv_cache_manager.evict_blocks(invalid)
        # The last request is preempted first, so the queue keeps the order in which they ran.
        for victim in reversed(victims):
            self.running.remove(victim)
            self.preempt(victim)
        return {victim.request_id for victim in victims}

    def _drop_next_tokens(self, request: Request) -> None:
        """Drops a request's tokens in flight and its drafts, and makes its next step allocate."""
        self._steps_in_flight.discard(request)
        request.spec_token_ids = []
        request.num_output_placeholders = 0
        request.set_tokens_before_allocate(0)

    def schedule_waiting(self, plan: StepPlan) -> None:
        """Admits waiting requests in the order of the queue, within the remaining token budget."""
        skipped: list[Request] = []
        max_num_seqs = self._scheduler_config.max_num_seqs
        while self._waiting and plan.token_budget > 0 and len(self.running) < max_num_seqs:
            request = self._waiting.peek_request()
            admission = self._try_admit(request, plan)
            if admission is _Admission.NO_ROOM:
                break
            self._waiting.pop_request()
            if admission is _Admission.SKIPPED:
                skipped.append(request)
        if skipped:
            self._waiting.prepend_requests(skipped)

    def _try_admit(self, request: Request, plan: StepPlan) -> _Admission:
        if not self._admission_gate.is_open(request, plan):
            return _Admission.SKIPPED
        prefix = self._admission_gate.find_computed_prefix(request)
        if prefix is None:
            plan.is_connector_undecided = True
            return _Admission.SKIPPED
        num_computed_tokens = (
            request.num_computed_tokens + prefix.num_local_tokens + prefix.num_external_tokens
        )
        num_new_tokens, demand = 0, None
        if not prefix.is_loaded_async:
            num_new_tokens, demand = self._cut_first_chunk(
                request, num_computed_tokens, plan.token_budget
            )
            if num_new_tokens == 0:
                return _Admission.NO_ROOM
        if not self._allocate_waiting(request, num_new_tokens, prefix):
            if prefix.fork_source is None or self.running:
                return _Admission.NO_ROOM
            # No request runs, so no block will become free. The fork may lack only one block: the
            # copy of a partly shared block. Try again without sharing.
            request.fork_source = None
            return self._try_admit(request, plan)
        if prefix.fork_source is not None:
            # The two requests share a block, and the source may write into it: it needs a check.
            prefix.fork_source.set_tokens_before_allocate(0)
        if self._remote_kv is not None:
            self._remote_kv.record_allocated(request, prefix.num_external_tokens)
        if prefix.is_loaded_async:
            self._remote_kv.start_loading(request, num_computed_tokens)
            request.status = RequestStatus.WAITING_FOR_REMOTE_KVS
            return _Admission.SKIPPED
        if demand is not None:
            self._encoder_inputs.commit(request, demand)
        self._start(request, num_computed_tokens, num_new_tokens, plan)
        return _Admission.ADMITTED

    def _cut_first_chunk(
        self, request: Request, num_computed_tokens: int, token_budget: int
    ) -> tuple[int, EncoderDemand | None]:
        """Number of tokens that a waiting request computes first, and items to encode for it.

        The number is 0 if the budgets have no room for the request.
        """
        config = self._scheduler_config
        num_new_tokens = request.num_tokens - num_computed_tokens
        threshold = config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # A resumed request or a fork may be longer than a whole step, so it must be split. The
        # prompt of a new request never is (see `RequestLimits`).
        may_split = config.enable_chunked_prefill or num_new_tokens > config.max_num_batched_tokens
        if num_new_tokens > token_budget and not may_split:
            return 0, None
        num_new_tokens = self._kv_cache_manager.cut_at_save_point(
            request, num_computed_tokens, min(num_new_tokens, token_budget)
        )
        if not request.mm_features:
            return num_new_tokens, None
        demand = self._encoder_inputs.fit(request, num_computed_tokens, num_new_tokens)
        return demand.num_new_tokens, demand

    def _allocate_waiting(
        self, request: Request, num_new_tokens: int, prefix: ComputedPrefix
    ) -> bool:
        """Allocates blocks for a waiting request; False if there is no room.

        Never preempts a running request. It frees blocks that are kept for forks and, while no
        request runs, blocks that were loaded for other waiting requests.
        """
        encoder_decoder = self._encoder_inputs.is_encoder_decoder
        while True:
            new_blocks = self._kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=prefix.num_local_tokens,
                new_computed_blocks=prefix.blocks,
                # As in vLLM: a request's first step has no drafts, and the number of blocks to
                # load must equal the number that the connector stores.
                num_lookahead_tokens=(
                    0 if request.num_computed_tokens == 0 else self._num_lookahead_tokens
                ),
                num_external_computed_tokens=prefix.num_external_tokens,
                delay_cache_blocks=prefix.is_loaded_async,
                num_encoder_tokens=(
                    sum(feature.length for feature in request.mm_features) if encoder_decoder else 0
                ),
                # If no request runs, no request can be preempted later, and blocks held by a
                # request that is being loaded must not keep this request waiting forever.
                full_sequence_must_fit=(
                    self._scheduler_config.full_sequence_must_fit and bool(self.running)
                ),
            )
            if new_blocks is not None:
                return True
            if not self._spare_blocks.release_oldest_kept() and (
                self.running or not self._spare_blocks.drop_last_loaded(request)
            ):
                return False

    def _start(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan
    ) -> None:
        """Moves a waiting request that has its blocks to the running requests."""
        request.num_computed_tokens = num_computed_tokens
        request.set_tokens_before_allocate(
            self._kv_cache_manager.get_max_tokens_before_allocate(request, is_step_decided=True)
        )
        request.fork_source = None
        is_new = request.status is RequestStatus.WAITING
        if is_new:
            request.num_cached_tokens = num_computed_tokens
        all_blocks = self._kv_cache_manager.get_first_step_blocks(request.request_id)
        plan.add_admitted(request, num_new_tokens, all_blocks, is_new=is_new)
        request.status = RequestStatus.RUNNING
        self.running.append(request)
