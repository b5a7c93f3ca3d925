"""StepPlan: one step's decision while it is being made."""

from paxkv.contracts.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from paxkv.kv_cache.manager import KVCacheBlocks
from paxkv.scheduler.request import Request


class StepPlan:
    """Who runs in this step, with how many tokens, in which blocks.

    Args:
        token_budget: Tokens that the step may still give out.
    """

    def __init__(self, token_budget: int) -> None:
        self.token_budget = token_budget
        self.num_scheduled_tokens: dict[str, int] = {}
        self.preempted_req_ids: set[str] = set()
        self._new: list[Request] = []
        self._resumed: list[Request] = []
        self._running: dict[str, Request] = {}
        # New blocks of a running request, all blocks of the others.
        self._blocks: dict[str, KVCacheBlocks] = {}

    def add_running(self, request: Request, num_new_tokens: int, new_blocks: KVCacheBlocks) -> None:
        self._running[request.request_id] = request
        self._spend(request, num_new_tokens, new_blocks)

    def add_new(self, request: Request, num_new_tokens: int, all_blocks: KVCacheBlocks) -> None:
        self._new.append(request)
        self._spend(request, num_new_tokens, all_blocks)

    def add_resumed(self, request: Request, num_new_tokens: int, all_blocks: KVCacheBlocks) -> None:
        self._resumed.append(request)
        self._spend(request, num_new_tokens, all_blocks)

    def add_preempted(self, request: Request) -> None:
        """Notes a preemption; what a victim was given earlier in this step, it gives back."""
        self.preempted_req_ids.add(request.request_id)
        if self._running.pop(request.request_id, None) is not None:
            self.token_budget += self.num_scheduled_tokens.pop(request.request_id)
            del self._blocks[request.request_id]

    def build_output(self, finished_req_ids: frozenset[str]) -> SchedulerOutput:
        """The decision as the runner gets it; to be built before any request advances."""
        cached = [*self._running.values(), *self._resumed]
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.prompt_token_ids,
                    sampling_params=request.sampling_params,
                    block_ids=self._blocks[request.request_id].get_block_ids(),
                    num_computed_tokens=request.num_computed_tokens,
                )
                for request in self._new
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids=frozenset(request.request_id for request in self._resumed),
                new_block_ids=[self._new_block_ids(request) for request in cached],
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                num_output_tokens=[request.num_output_tokens for request in cached],
                all_token_ids={
                    request.request_id: request.all_token_ids.copy() for request in self._resumed
                },
            ),
            num_scheduled_tokens=self.num_scheduled_tokens,
            total_num_scheduled_tokens=sum(self.num_scheduled_tokens.values()),
            preempted_req_ids=frozenset(self.preempted_req_ids),
            finished_req_ids=finished_req_ids,
        )

    def _spend(self, request: Request, num_new_tokens: int, blocks: KVCacheBlocks) -> None:
        self.num_scheduled_tokens[request.request_id] = num_new_tokens
        self.token_budget -= num_new_tokens
        self._blocks[request.request_id] = blocks

    def _new_block_ids(self, request: Request) -> tuple[list[int], ...] | None:
        blocks = self._blocks[request.request_id]
        return None if blocks.is_empty() else blocks.get_block_ids()
