"""AdmissionGate: whether a waiting request may run now, and which of its tokens need no step."""

import dataclasses

from paxkv.contracts.protocols import GrammarGate
from paxkv.kv_cache.manager import KVCacheBlocks, KVCacheManager
from paxkv.scheduler.participants.forks import KeptRequests, num_shareable_tokens
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.step_plan import StepPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ComputedPrefix:
    """Leading tokens of a waiting request that need not be computed.

    Args:
        blocks: Prefix hits, or blocks of the request it is forked from; None for a request that
            holds its blocks already, as they were loaded while it waited.
        num_local_tokens: Tokens in `blocks`.
        num_external_tokens: Further ones that the connector loads.
        is_loaded_async: They are loaded while other steps run.
        fork_source: Whose blocks `blocks` are.
    """

    blocks: KVCacheBlocks | None
    num_local_tokens: int
    num_external_tokens: int = 0
    is_loaded_async: bool = False
    fork_source: Request | None = None


class AdmissionGate:
    """Asks everyone whom a waiting request may have to wait for."""

    def __init__(
        self,
        *,
        kv_cache_manager: KVCacheManager,
        kept_requests: KeptRequests,
        remote_kv: RemoteKV | None,
        grammar_gate: GrammarGate | None,
    ) -> None:
        self._manager = kv_cache_manager
        self._kept_requests = kept_requests
        self._remote_kv = remote_kv
        self._grammar_gate = grammar_gate

    def is_open(self, request: Request, plan: StepPlan) -> bool:
        """Whether nothing outside the pool and the budget keeps the request waiting.

        Its status becomes what it waits for, or WAITING or PREEMPTED when it need not.

        Args:
            plan: The step so far.
        """
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if self._remote_kv is None or not self._remote_kv.finish_loading(request):
                return False
            has_run = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
            # Blocks of another request would stand where the loaded ones do.
            if request.num_computed_tokens > 0:
                request.fork_source = None
        if request.status is RequestStatus.WAITING_FOR_FSM:
            if self._grammar_gate is None or not self._grammar_gate.is_ready(request.request_id):
                return False
            request.status = RequestStatus.WAITING
        source = request.fork_source
        if source is not None:
            must_wait = self._must_wait_for_source(request, source, plan)
            request.status = RequestStatus.WAITING_FOR_FORK if must_wait else RequestStatus.WAITING
            return not must_wait
        return True

    def find_computed_prefix(self, request: Request) -> ComputedPrefix | None:
        """What the request need not compute; None where the connector does not know it yet.

        Nothing is taken: the blocks go to `allocate_slots` before anything else does.
        """
        if request.num_computed_tokens > 0:
            return ComputedPrefix(blocks=None, num_local_tokens=0)
        hits, num_hit_tokens = self._manager.get_computed_blocks(request)
        fork = self._find_fork(request, num_hit_tokens)
        if fork is not None:
            return fork
        num_external_tokens: int | None = 0
        is_async = False
        if self._remote_kv is not None:
            num_external_tokens, is_async = self._remote_kv.match(request, num_hit_tokens)
        if num_external_tokens is None:
            return None
        return ComputedPrefix(
            blocks=hits,
            num_local_tokens=num_hit_tokens,
            num_external_tokens=num_external_tokens,
            is_loaded_async=is_async,
        )

    def _must_wait_for_source(self, request: Request, source: Request, plan: StepPlan) -> bool:
        """Whether waiting brings more shared tokens; a source that cannot share is forgotten."""
        if source.is_finished and source in self._kept_requests:
            return False
        # Preempted, its blocks are gone, and it would be computed no sooner than this one.
        if source.is_finished or source.status is RequestStatus.PREEMPTED:
            request.fork_source = None
            return False
        # What a request found when it was admitted may be written, or loaded, in this very step,
        # and block copies come before that.
        if plan.is_admitted(source):
            return True
        # Tokens of this step are not counted yet, for the same reason.
        return source.num_computed_tokens < num_shareable_tokens(source, request)

    def _find_fork(self, request: Request, num_hit_tokens: int) -> ComputedPrefix | None:
        """The source's blocks, where they hold more tokens than the prefix hit."""
        source = request.fork_source
        if source is None:
            return None
        num_tokens = min(num_shareable_tokens(source, request), source.num_computed_tokens)
        if num_tokens <= num_hit_tokens:
            return None
        blocks = self._manager.get_forked_blocks(source, num_tokens)
        if blocks is None:
            return None
        return ComputedPrefix(blocks=blocks, num_local_tokens=num_tokens, fork_source=source)
