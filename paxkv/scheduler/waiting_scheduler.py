"""WaitingScheduler: which waiting requests are admitted, in what is left of a step."""

import enum

from paxkv.config.engine_config import SchedulerConfig
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.scheduler.admission import AdmissionGate, ComputedPrefix
from paxkv.scheduler.participants.encoder_inputs import EncoderDemand, EncoderInputs
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.participants.spare_blocks import SpareBlocks
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.request_queue import RequestQueue
from paxkv.scheduler.step_plan import StepPlan


class _Admission(enum.Enum):
    """What became of the request in front of the waiting queue."""

    ADMITTED = enum.auto()
    # It waits for something else than room, and those behind it may pass.
    SKIPPED = enum.auto()
    # There is no room for it, so there is for nobody behind it.
    NO_ROOM = enum.auto()


class WaitingScheduler:
    """The second half of a step. The queues are the scheduler's own; both change them.

    Args:
        running: Those admitted are added at the end.
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
        running: list[Request],
        waiting: RequestQueue,
    ) -> None:
        self._scheduler_config = scheduler_config
        self._num_lookahead_tokens = num_lookahead_tokens
        self._kv_cache_manager = kv_cache_manager
        self._encoder_inputs = encoder_inputs
        self._spare_blocks = spare_blocks
        self._admission_gate = admission_gate
        self._remote_kv = remote_kv
        self._running = running
        self._waiting = waiting

    def schedule(self, plan: StepPlan) -> None:
        skipped: list[Request] = []
        max_num_seqs = self._scheduler_config.max_num_seqs
        while self._waiting and plan.token_budget > 0 and len(self._running) < max_num_seqs:
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
            plan.has_asked_later = True
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
        if not self._allocate(request, num_new_tokens, prefix):
            if prefix.fork_source is None or self._running:
                return _Admission.NO_ROOM
            # Alone in the pool it may lack just the copy of a block that it would share in part.
            request.fork_source = None
            return self._try_admit(request, plan)
        if prefix.fork_source is not None:
            # The two share a block that one of them will write into.
            prefix.fork_source.note_block_work(0)
        if self._remote_kv is not None:
            self._remote_kv.note_allocated(request, prefix.num_external_tokens)
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
        """Tokens that a waiting request would compute first, and items to encode.

        0 where the budgets have no room for it.
        """
        config = self._scheduler_config
        num_new_tokens = request.num_tokens - num_computed_tokens
        threshold = config.long_prefill_token_threshold
        if 0 < threshold < num_new_tokens:
            num_new_tokens = threshold
        # More than a whole step: no prompt of a caller's (see `RequestLimits`), but a request that
        # resumes with its output, or a fork. It is split, or it would wait forever.
        may_split = config.enable_chunked_prefill or num_new_tokens > config.max_num_batched_tokens
        if num_new_tokens > token_budget and not may_split:
            return 0, None
        num_new_tokens = min(num_new_tokens, token_budget)
        if not request.mm_features:
            return num_new_tokens, None
        demand = self._encoder_inputs.fit(request, num_computed_tokens, num_new_tokens)
        return demand.num_new_tokens, demand

    def _allocate(self, request: Request, num_new_tokens: int, prefix: ComputedPrefix) -> bool:
        """Gets a waiting request room. It never preempts who runs; it takes what nobody runs on."""
        encoder_decoder = self._encoder_inputs.is_encoder_decoder
        while True:
            new_blocks = self._kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=prefix.num_local_tokens,
                new_computed_blocks=prefix.blocks,
                # As in vLLM: a request's first step has no drafts yet, and blocks that are
                # loaded must be as many here as there.
                num_lookahead_tokens=(
                    0 if request.num_computed_tokens == 0 else self._num_lookahead_tokens
                ),
                num_external_computed_tokens=prefix.num_external_tokens,
                delay_cache_blocks=prefix.is_loaded_async,
                num_encoder_tokens=(
                    sum(feature.length for feature in request.mm_features) if encoder_decoder else 0
                ),
                # Where nobody runs there is nobody to preempt; and what is held while it waits
                # to be loaded must not keep it out for good.
                full_sequence_must_fit=(
                    self._scheduler_config.full_sequence_must_fit and bool(self._running)
                ),
            )
            if new_blocks is not None:
                return True
            if not self._spare_blocks.release_oldest_kept() and (
                self._running or not self._spare_blocks.drop_last_loaded(request)
            ):
                return False

    def _start(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan
    ) -> None:
        """A waiting request that has its blocks begins to run."""
        request.num_computed_tokens = num_computed_tokens
        request.note_block_work(self._kv_cache_manager.get_num_tokens_before_block_work(request))
        request.fork_source = None
        is_new = request.status is RequestStatus.WAITING
        if is_new:
            request.num_cached_tokens = num_computed_tokens
        all_blocks = self._kv_cache_manager.get_blocks(request.request_id)
        plan.add_admitted(request, num_new_tokens, all_blocks, is_new=is_new)
        request.status = RequestStatus.RUNNING
        self._running.append(request)
