"""AdmissionGate: whether a waiting request may run, and which of its tokens are computed."""

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
        blocks: Prefix hits, or blocks of the fork source. None for a request whose blocks were
            loaded while it waited: it holds them already.
        num_local_tokens: Tokens in `blocks`.
        num_external_tokens: Further tokens, which the connector loads.
        is_loaded_async: The connector loads the external tokens while other steps run.
        fork_source: The request that holds `blocks`, if they are not prefix hits.
    """

    blocks: KVCacheBlocks | None
    num_local_tokens: int
    num_external_tokens: int = 0
    is_loaded_async: bool = False
    fork_source: Request | None = None


class AdmissionGate:
    """Checks whether a waiting request still waits for a load, a grammar or a fork source."""

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
        """Whether the request may run, if the pool and the token budget have room for it.

        Sets the request's status to the reason for waiting, or to WAITING or PREEMPTED if there is
        none.

        Args:
            plan: The step as decided so far.
        """
        if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
            if self._remote_kv is None or not self._remote_kv.finish_loading(request):
                return False
            has_run = request.num_preemptions > 0
            request.status = RequestStatus.PREEMPTED if has_run else RequestStatus.WAITING
            # Loaded blocks take the place of the blocks that the fork would share.
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
        """Finds the tokens that need no computation; None if the connector has no answer yet.

        The blocks are not allocated here. The caller must pass them to `allocate_slots` before any
        other change of the pool.
        """
        if request.num_computed_tokens > 0:
            return ComputedPrefix(blocks=None, num_local_tokens=0)
        hits, num_hit_tokens = self._manager.get_computed_blocks(request)
        request.state_save_at = self._manager.get_state_to_save(request, num_hit_tokens)
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
        """Whether the fork should wait until its source has computed more tokens to share.

        Clears `request.fork_source` if the source cannot share its blocks any more.
        """
        if source.is_finished and source in self._kept_requests:
            return False
        # A preempted source has no blocks, and will not be computed before this request.
        if source.is_finished or source.status is RequestStatus.PREEMPTED:
            request.fork_source = None
            return False
        # Blocks of a source that is admitted in this step may be written or loaded in this step.
        # The runner copies blocks before that, so a fork would copy old data.
        if plan.is_admitted(source):
            return True
        # `num_computed_tokens` excludes this step's tokens: they too are written after the copies.
        return source.num_computed_tokens < num_shareable_tokens(source, request)

    def _find_fork(self, request: Request, num_hit_tokens: int) -> ComputedPrefix | None:
        """The source's blocks; None unless they hold more tokens than the prefix hit."""
        source = request.fork_source
        if source is None:
            return None
        num_tokens = min(num_shareable_tokens(source, request), source.num_computed_tokens)
        if num_tokens <= num_hit_tokens:
            return None
        blocks = self._manager.get_forked_blocks(
            source, num_tokens, is_final=source.has_final_state
        )
        if blocks is None:
            return None
        return ComputedPrefix(blocks=blocks, num_local_tokens=num_tokens, fork_source=source)
