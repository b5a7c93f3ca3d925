"""Scheduler: one token budget a step, shared by prompts being computed and tokens being decoded."""

from collections.abc import Iterable

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.contracts.engine_output import EngineCoreOutput, FinishReason, SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.errors import InvalidRequestError, InvariantError
from paxkv.kv_cache.block_hash import BlockHasher
from paxkv.kv_cache.manager import KVCacheBlocks, KVCacheManager
from paxkv.scheduler.invariants import check_requests
from paxkv.scheduler.limits import RequestLimits
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.request_queue import create_request_queue
from paxkv.scheduler.step_plan import StepPlan
from paxkv.scheduler.update import append_until_stop


class Scheduler:
    """Decides who runs in each step and owns every request until it ends.

    `schedule` and `update_from_output` alternate; requests may be added and finished at any
    moment between them.

    Source: vLLM `v1/core/sched/scheduler.py`.
    """

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
    ) -> None:
        self.scheduler_config = scheduler_config
        self.max_model_len = max_model_len
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
        )
        self.limits = RequestLimits(
            max_model_len=max_model_len,
            max_prompt_tokens=_max_prompt_tokens(scheduler_config),
            num_usable_blocks=kv_cache_config.num_blocks - 1,
            block_size=self.kv_cache_manager.block_size,
            num_kv_cache_groups=self.kv_cache_manager.num_kv_cache_groups,
        )
        self._block_hasher = (
            BlockHasher(
                block_size=self.kv_cache_manager.block_size, seed=cache_config.prefix_caching_seed
            )
            if cache_config.enable_prefix_caching
            else None
        )
        # Unfinished requests; each is in `running` or in `waiting`.
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting = create_request_queue(scheduler_config.policy)
        # Ended since the last step; the next one tells the runner.
        self.finished_req_ids: set[str] = set()
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_scheduled_tokens = 0

    @property
    def max_tokens_that_fit(self) -> int:
        """Most token positions that one request can ever hold in the pool."""
        return self.limits.max_tokens_that_fit

    def add_request(self, request: EngineRequest) -> None:
        """Takes in a request, at the end of the waiting queue or by its priority.

        Raises:
            InvalidRequestError: It could never run to its end (see `RequestLimits.check`), or
                an unfinished request has its id.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"request_id={request.request_id!r} is taken by an unfinished request.",
                param="request_id",
            )
        self.limits.check(request)
        added = Request(
            request,
            max_num_tokens=self.limits.max_num_tokens(request),
            block_hasher=self._block_hasher,
        )
        self.requests[added.request_id] = added
        self.waiting.add_request(added)

    def schedule(self) -> SchedulerOutput:
        """Decides one step.

        There is no prefill or decode phase: each request gets tokens, so that its
        `num_computed_tokens` catches up with its `num_tokens`. While there are unfinished
        requests, someone gets at least one.
        """
        plan = StepPlan(self.scheduler_config.max_num_batched_tokens)
        self._schedule_running(plan)
        # Whoever was preempted waits in front: admitting would only move the shortage on.
        if not plan.preempted_req_ids:
            self._schedule_waiting(plan)
        output = plan.build_output(frozenset(self.finished_req_ids))
        self.finished_req_ids.clear()

        # The step is as good as done: steps run in order, so its K and V are written before
        # any later step reads them.
        for req_id, num_tokens in plan.num_scheduled_tokens.items():
            self.requests[req_id].num_computed_tokens += num_tokens
        self.num_steps += 1 if plan.num_scheduled_tokens else 0
        self.num_scheduled_tokens += output.total_num_scheduled_tokens
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Appends sampled tokens and ends the requests that they end.

        Tokens of requests that were finished while the step ran are dropped. A request without
        tokens has more of its prompt to compute, and gets no output.

        Raises:
            InvariantError: The runner sampled for a request it was not asked to compute, or
                before all its tokens were computed.
        """
        outputs: list[EngineCoreOutput] = []
        for req_id, token_ids, logprobs in zip(
            runner_output.req_ids,
            runner_output.sampled_token_ids,
            runner_output.logprobs,
            strict=True,
        ):
            if req_id not in scheduler_output.num_scheduled_tokens:
                raise InvariantError(f"{req_id=} was computed but not scheduled.")
            request = self.requests.get(req_id)
            # A new request may have taken the id of a finished one; it waits, so far.
            if request is None or request.status is not RequestStatus.RUNNING or not token_ids:
                continue
            if request.num_computed_tokens < request.num_tokens:
                raise InvariantError(f"{request!r} got a token before its last was computed.")
            outputs.append(append_until_stop(request, token_ids, logprobs))
            if request.is_finished:
                self._free_request(request)
        if any(output.finish_reason is not None for output in outputs):
            self.running = [request for request in self.running if not request.is_finished]
        return outputs

    def finish_requests(
        self, request_ids: Iterable[str], finish_reason: FinishReason = "abort"
    ) -> None:
        """Ends requests at once, running or not; ids of no unfinished request are ignored."""
        # In the order given, each once: the order of freeing decides what is evicted first.
        finished = [
            request
            for req_id in dict.fromkeys(request_ids)
            if (request := self.requests.get(req_id)) is not None
        ]
        if not finished:
            return
        for request in finished:
            request.finish(finish_reason)
            self._free_request(request)
        self.running = [request for request in self.running if not request.is_finished]
        self.waiting.remove_requests({request.request_id for request in finished})

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether requests ended that the runner does not know of yet."""
        return bool(self.finished_req_ids)

    def reset_prefix_cache(self) -> bool:
        """Forgets every cached block; False, and nothing changed, while a block is in use."""
        return self.kv_cache_manager.reset_prefix_cache()

    def make_stats(self) -> SchedulerStats:
        """A snapshot, in O(running requests); the runner's own counters stay 0."""
        pool = self.kv_cache_manager.block_pool
        prefix_cache_stats = self.kv_cache_manager.prefix_cache_stats
        num_allocated_slots, num_used_slots = self.kv_cache_manager.count_slots(self.running)
        return SchedulerStats(
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            kv_cache_usage=pool.get_usage(),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.get_num_free_blocks(),
            num_preemptions=self.num_preemptions,
            prefix_cache_queries=prefix_cache_stats.num_queries,
            prefix_cache_hits=prefix_cache_stats.num_hits,
            num_allocated_slots=num_allocated_slots,
            num_used_slots=num_used_slots,
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
        )

    def check_invariants(self) -> None:
        """Checks the block pool, the block tables and the queues, in O(n).

        Raises:
            InvariantError: A rule is broken.
        """
        self.kv_cache_manager.check_invariants()
        check_requests(self.requests, self.running, self.waiting)
        if len(self.running) > self.scheduler_config.max_num_seqs:
            raise InvariantError(f"{len(self.running)} requests run, over max_num_seqs.")
        for request in self.waiting:
            if not self.kv_cache_manager.get_blocks(request.request_id).is_empty():
                raise InvariantError(f"{request!r} waits and holds blocks.")
        for request in self.running:
            for blocks in self.kv_cache_manager.get_blocks(request.request_id).blocks:
                if len(blocks) * self.kv_cache_manager.block_size < request.num_computed_tokens:
                    raise InvariantError(f"{request!r} has only {len(blocks)} blocks.")

    def _schedule_running(self, plan: StepPlan) -> None:
        threshold = self.scheduler_config.long_prefill_token_threshold
        # A copy: preemption takes requests out while we go through.
        for request in self.running.copy():
            if plan.token_budget == 0:
                return
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted in this step, by an earlier one
            num_new_tokens = request.num_tokens - request.num_computed_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            # The last position of all is only sampled, never computed.
            num_new_tokens = min(
                num_new_tokens,
                plan.token_budget,
                self.max_model_len - 1 - request.num_computed_tokens,
            )
            if num_new_tokens <= 0:
                continue  # its next token is still on its way; others may have work
            new_blocks = self._allocate_or_preempt(request, num_new_tokens, plan)
            if new_blocks is not None:
                plan.add_running(request, num_new_tokens, new_blocks)

    def _allocate_or_preempt(
        self, request: Request, num_new_tokens: int, plan: StepPlan
    ) -> KVCacheBlocks | None:
        """Room for a running request, taken from others if need be; None if it fell itself."""
        while request.status is RequestStatus.RUNNING:
            new_blocks = self.kv_cache_manager.allocate_slots(request, num_new_tokens)
            if new_blocks is not None:
                return new_blocks
            if self.scheduler_config.policy == "priority":
                victim = max(self.running, key=lambda running: running.sort_key)
                self.running.remove(victim)
            else:
                victim = self.running.pop()
            self._preempt(victim, plan)
        return None

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Takes a request's blocks and puts it back in the queue, to be computed anew.

        Its `num_computed_tokens` does not count this step yet: blocks that it was given earlier
        in this step under the priority policy are withdrawn from the prefix cache by `free`.
        """
        self.kv_cache_manager.free(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        plan.add_preempted(victim)
        self.waiting.prepend_request(victim)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        config = self.scheduler_config
        threshold = config.long_prefill_token_threshold
        while self.waiting and plan.token_budget > 0 and len(self.running) < config.max_num_seqs:
            request = self.waiting.peek_request()
            hits, num_hit_tokens = self.kv_cache_manager.get_computed_blocks(request)
            num_new_tokens = request.num_tokens - num_hit_tokens
            if 0 < threshold < num_new_tokens:
                num_new_tokens = threshold
            # More than a whole step: no prompt (see `RequestLimits`), but a request that
            # resumes with its output. It is split, or it would wait forever.
            may_split = (
                config.enable_chunked_prefill or num_new_tokens > config.max_num_batched_tokens
            )
            if num_new_tokens > plan.token_budget and not may_split:
                return
            num_new_tokens = min(num_new_tokens, plan.token_budget)
            new_blocks = self.kv_cache_manager.allocate_slots(
                request,
                num_new_tokens,
                num_new_computed_tokens=num_hit_tokens,
                new_computed_blocks=hits,
            )
            # Whoever waits never preempts who runs, and nobody overtakes the one in front.
            if new_blocks is None:
                return
            self.waiting.pop_request()
            self._admit(request, num_hit_tokens, num_new_tokens, plan)

    def _admit(
        self, request: Request, num_hit_tokens: int, num_new_tokens: int, plan: StepPlan
    ) -> None:
        all_blocks = self.kv_cache_manager.get_blocks(request.request_id)
        request.num_computed_tokens = num_hit_tokens
        if request.status is RequestStatus.WAITING:
            request.num_cached_tokens = num_hit_tokens
            plan.add_new(request, num_new_tokens, all_blocks)
        else:
            plan.add_resumed(request, num_new_tokens, all_blocks)
        request.status = RequestStatus.RUNNING
        self.running.append(request)

    def _free_request(self, request: Request) -> None:
        """Forgets a finished request; the caller takes it out of its queue."""
        self.kv_cache_manager.free(request)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)


def _max_prompt_tokens(config: SchedulerConfig) -> int | None:
    """Longest prompt that one step can take on; None where prompts are split over steps."""
    threshold = config.long_prefill_token_threshold
    is_split = config.enable_chunked_prefill or 0 < threshold <= config.max_num_batched_tokens
    return None if is_split else config.max_num_batched_tokens
