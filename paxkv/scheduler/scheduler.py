"""Scheduler: shares one token budget per step between prefill and decode."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from paxkv.config.cache_config import CacheConfig
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_output import EngineCoreOutput, SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.contracts.observation import KVCacheEvent, PrefixCacheMiss
from paxkv.contracts.protocols import GrammarGate, KVConnector
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs
from paxkv.errors import ConfigError, InvalidRequestError, InvariantError
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.observers.block_pool_observer import BlockPoolObserver
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from paxkv.kv_cache.observers.metrics_collector import make_metrics_collector
from paxkv.scheduler.admission import AdmissionGate
from paxkv.scheduler.decode_burst import DecodeBursts
from paxkv.scheduler.draft_counts import DraftCounts
from paxkv.scheduler.invariants import check_blocks, check_requests
from paxkv.scheduler.limits import make_request_limits
from paxkv.scheduler.participants.encoder_inputs import EncoderInputs
from paxkv.scheduler.participants.forks import KeptRequests
from paxkv.scheduler.participants.remote_kv import RemoteKV
from paxkv.scheduler.participants.spare_blocks import SpareBlocks
from paxkv.scheduler.request import EndReason, Request, RequestStatus, make_block_hasher
from paxkv.scheduler.request_queue import create_request_queue
from paxkv.scheduler.scheduler_stats import make_scheduler_stats
from paxkv.scheduler.step_plan import StepPlan
from paxkv.scheduler.step_scheduler import StepScheduler
from paxkv.scheduler.steps_in_flight import StepsInFlight
from paxkv.scheduler.update import (
    append_plain,
    append_until_stop,
    end_pooled,
    keep_drafts,
    num_rejected_tokens,
)


class Scheduler:
    """Decides which requests run in each step, and owns every request until it ends.

    The caller calls `update_from_output` once for each `schedule`, in the same order. It may
    schedule a step before the previous step has returned its tokens. Requests may be added and
    finished between any two calls.

    Args:
        connector: Loads and saves keys and values outside this engine; None if there is no such
            store.
        grammar_gate: Reports which grammars are compiled. Without it, requests with a grammar are
            rejected.
        num_lookahead_tokens: Largest number of drafts of a request; 0 without a drafter. A running
            request gets this many slots beyond its tokens.
        use_eagle: Compute the last block of a prefix hit again, because the drafter needs its
            hidden states.
        count_common_prefix_blocks: Fill `SchedulerOutput.num_common_prefix_blocks`. Attention that
            computes a common prefix once for all requests needs it.
        bursts_change_logits: See `DecodeBursts.may_change_logits`.

    Source: vLLM `v1/core/sched/scheduler.py`.
    """

    def __init__(
        self,
        *,
        scheduler_config: SchedulerConfig,
        cache_config: CacheConfig,
        kv_cache_config: KVCacheConfig,
        max_model_len: int,
        connector: KVConnector | None = None,
        grammar_gate: GrammarGate | None = None,
        num_lookahead_tokens: int = 0,
        use_eagle: bool = False,
        count_common_prefix_blocks: bool = False,
        bursts_change_logits: bool = True,
    ) -> None:
        self.scheduler_config = scheduler_config
        self.max_model_len = max_model_len
        self.num_lookahead_tokens = num_lookahead_tokens
        # Whether the last step with tokens returned drafts, or expects to have some soon.
        self.is_waiting_for_drafts = num_lookahead_tokens > 0
        self.draft_counts = DraftCounts(num_lookahead_tokens)
        self._count_common_prefix_blocks = count_common_prefix_blocks
        observers: list[BlockPoolObserver] = []
        self.metrics_collector = make_metrics_collector(cache_config.kv_cache_metrics_sample)
        if self.metrics_collector is not None:
            observers.append(self.metrics_collector)
        self._event_recorder = None
        if cache_config.kv_events is not None:
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            self._event_recorder = KVEventRecorder(specs)
            observers.append(self._event_recorder)
        self.kv_cache_manager = KVCacheManager(
            kv_cache_config=kv_cache_config,
            max_model_len=max_model_len,
            enable_caching=cache_config.enable_prefix_caching,
            use_eagle=use_eagle,
            state_cache_share=cache_config.state_cache_share,
            state_save_interval=cache_config.state_save_interval,
            observers=observers,
        )
        self.limits = make_request_limits(
            scheduler_config,
            kv_cache_config,
            max_model_len=max_model_len,
            # Attention sinks hold their permanent blocks already.
            num_usable_blocks=self.kv_cache_manager.block_pool.get_num_free_blocks(),
            num_lookahead_tokens=num_lookahead_tokens,
        )
        if self.limits.is_encoder_decoder and connector is not None:
            raise ConfigError(
                "an encoder-decoder model cannot use a KV connector: the connector does not know "
                "the blocks of cross-attention layers. Start the engine without a connector."
            )
        if kv_cache_config.has_states and (connector is not None or use_eagle):
            raise ConfigError(
                "a model with states cannot use a KV connector, or drop the last block of prefix "
                "hits (use_eagle). A connector loads no states, and a hit without its last block "
                "often ends where no state is saved. Start the engine without them."
            )
        # A step writes the state before its drafts, so accepted drafts are computed again.
        self._recomputes_drafts = kv_cache_config.has_states
        self._block_hasher = make_block_hasher(cache_config, kv_cache_config)
        # Unfinished requests; each is in `running` or in `waiting`.
        self.requests: dict[str, Request] = {}
        self.waiting = create_request_queue(scheduler_config.policy)
        # Finished requests whose blocks are kept for forks.
        self.kept_requests = KeptRequests()
        self.encoder_inputs = EncoderInputs(
            max_num_encoder_input_tokens=scheduler_config.max_num_encoder_input_tokens,
            cache_size=scheduler_config.encoder_cache_size,
            is_encoder_decoder=self.limits.is_encoder_decoder,
        )
        self.remote_kv = None if connector is None else RemoteKV(connector, self.kv_cache_manager)
        self.spare_blocks = SpareBlocks(
            self.kv_cache_manager, self.kept_requests, self.waiting, self.remote_kv
        )
        self._decode_bursts = DecodeBursts(
            self.kv_cache_manager,
            connector,
            may_change_logits=bursts_change_logits,
        )
        self._has_grammar_gate = grammar_gate is not None
        self.steps_in_flight = StepsInFlight()
        self._step_scheduler = StepScheduler(
            scheduler_config=scheduler_config,
            num_lookahead_tokens=num_lookahead_tokens,
            kv_cache_manager=self.kv_cache_manager,
            encoder_inputs=self.encoder_inputs,
            spare_blocks=self.spare_blocks,
            admission_gate=AdmissionGate(
                kv_cache_manager=self.kv_cache_manager,
                kept_requests=self.kept_requests,
                remote_kv=self.remote_kv,
                grammar_gate=grammar_gate,
            ),
            remote_kv=self.remote_kv,
            steps_in_flight=self.steps_in_flight,
            waiting=self.waiting,
        )
        # Requests that ended, or that a reset preempted, since the last step. The next
        # `SchedulerOutput` reports them to the runner.
        self.finished_req_ids: set[str] = set()
        self._reset_req_ids: set[str] = set()
        self.num_steps = 0
        self.num_scheduled_tokens = 0
        self._slot_counts = (0, 0)
        # Whether the connector had no answer yet when the last step asked what it can load.
        self._is_connector_undecided = False

    @property
    def max_tokens_that_fit(self) -> int:
        """Largest number of token positions that one request can hold in the pool."""
        return self.limits.max_tokens_that_fit

    @property
    def running(self) -> Sequence[Request]:
        """Running requests in the order of admission."""
        return self._step_scheduler.running

    @property
    def num_preemptions(self) -> int:
        return self._step_scheduler.num_preemptions

    def add_request(self, request: EngineRequest) -> None:
        """Adds a request to the waiting queue: at its end, or by priority.

        Raises:
            InvalidRequestError: The request could never finish (see `RequestLimits.check`), its id
                belongs to an unfinished request, it has a grammar and there is no grammar gate, or
                it has a grammar and is pooled.
        """
        req_id = request.request_id
        is_saved = self.remote_kv is not None and req_id in self.remote_kv.delayed
        if req_id in self.requests or is_saved:
            raise InvalidRequestError(
                f"request_id={req_id!r} is taken by an unfinished request. Use another id.",
                param="request_id",
            )
        if request.needs_grammar and not self._has_grammar_gate:
            raise InvalidRequestError(
                "this engine compiles no grammars; send the request without one.",
                param="needs_grammar",
            )
        if request.needs_grammar and request.is_pooled:
            raise InvalidRequestError(
                "a pooled request samples no token, so it cannot have a grammar; send the request "
                "without one.",
                param="needs_grammar",
            )
        self.limits.check(request)
        added = Request(
            request,
            max_num_tokens=self.limits.max_num_tokens(request),
            block_hasher=self._block_hasher,
        )
        if request.fork_from is not None:
            added.fork_source = self.requests.get(request.fork_from) or self.kept_requests.get(
                request.fork_from
            )
        # Block tables are keyed by request id, so a kept request with the same id must be freed.
        self.spare_blocks.release_kept(req_id)
        self.requests[req_id] = added
        self.waiting.add_request(added)

    def schedule(self, max_decode_steps: int = 1) -> SchedulerOutput:
        """Decides one step, or a burst of decode steps if no request waits.

        There is no prefill phase and no decode phase: each request gets tokens until its
        `num_computed_tokens` reaches its `num_tokens` and its drafts. At least one token is
        scheduled if there are unfinished requests and `may_schedule_nothing` is False.

        Args:
            max_decode_steps: Largest number of steps of a burst.
        """
        plan = StepPlan(self.scheduler_config.max_num_batched_tokens)
        self.encoder_inputs.start_step()
        self._step_scheduler.schedule_running(plan)
        # The preempted request is at the front of the queue. Admitting it now would only preempt
        # another request.
        if not plan.preempted_req_ids:
            self._step_scheduler.schedule_waiting(plan)
        self._is_connector_undecided = plan.is_connector_undecided
        if not self.is_waiting_for_drafts:
            self._decode_bursts.extend(plan, self.waiting, max_decode_steps)
        requests = plan.requests()
        output = self._build_output(plan, requests)
        self._advance(output, requests)
        return output

    def update_from_output(
        self, scheduler_output: SchedulerOutput, runner_output: ModelRunnerOutput
    ) -> list[EngineCoreOutput]:
        """Appends sampled tokens, and ends the requests that these tokens finish.

        Tokens are dropped if their request was finished or preempted while the step ran. A request
        for which no token was sampled has more of its prompt to compute, and gets no output.

        Raises:
            InvariantError: The step is not the oldest step in flight, or the runner sampled for a
                request that was not scheduled or whose tokens were not all computed.
        """
        requests = self.steps_in_flight.get_requests(scheduler_output)
        transfers = runner_output.kv_connector_output
        if transfers is not None and transfers.invalid_block_ids:
            self._reset_req_ids |= self._step_scheduler.recompute_invalid(
                transfers.invalid_block_ids
            )
        outputs, finished = self._append_step_tokens(requests, scheduler_output, runner_output)
        if runner_output.burst_drafts:
            outputs = self._count_burst_drafts(outputs, runner_output.burst_drafts)
        self.steps_in_flight.remove(scheduler_output)
        self._end_requests(finished)
        if self.num_lookahead_tokens > 0 and outputs:
            self.is_waiting_for_drafts = bool(runner_output.draft_token_ids)
        if runner_output.draft_token_ids:
            keep_drafts(self.requests, runner_output.draft_token_ids, outputs)
        if transfers is not None and self.remote_kv is not None:
            self.remote_kv.update(transfers)
        return outputs

    def finish_requests(
        self, request_ids: Iterable[str], finish_reason: EndReason = "abort"
    ) -> None:
        """Ends unfinished requests immediately, and frees blocks kept by finished requests.

        Unknown ids are ignored.
        """
        # Keep the given order: the order of freeing decides which blocks are evicted first.
        finished: list[Request] = []
        for req_id in dict.fromkeys(request_ids):
            request = self.requests.get(req_id)
            if request is None:
                self.spare_blocks.release_kept(req_id)
            else:
                finished.append(request)
        if not finished:
            return
        for request in finished:
            request.finish(finish_reason)
        self._end_requests(finished)
        self.waiting.remove_requests({request.request_id for request in finished})

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def num_unfinished_requests(self) -> int:
        return len(self.requests)

    def has_finished_requests(self) -> bool:
        """Whether the next step must report finished requests to the runner."""
        return bool(self.finished_req_ids)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Empties the prefix cache and frees blocks kept for forks.

        Returns False, and changes nothing, while a request holds blocks.

        Args:
            reset_running_requests: Preempt running requests, and free blocks that were loaded for
                waiting requests. Then only a transfer in progress makes the reset fail.
        """
        is_transferring = self.remote_kv is not None and self.remote_kv.has_transfers()
        loaded = self.spare_blocks.loaded_requests()
        if is_transferring or ((self.running or loaded) and not reset_running_requests):
            return False
        for request in reversed(loaded):
            self.spare_blocks.drop_loaded(request)
        for request in self._step_scheduler.preempt_all():
            self._reset_req_ids.add(request.request_id)
        while self.spare_blocks.release_oldest_kept():
            pass
        return self.kv_cache_manager.reset_prefix_cache()

    def drain_events(self) -> list[KVCacheEvent]:
        """KV cache events since the last call, in order; empty if events are disabled."""
        return [] if self._event_recorder is None else self._event_recorder.drain()

    def explain_prefix_cache_miss(self, request_id: str) -> PrefixCacheMiss:
        """Explains why a request did not find more of its prompt in the prefix cache.

        Raises:
            InvalidRequestError: No unfinished or recently admitted request has this id.
        """
        request = self.requests.get(request_id)
        if request is not None:
            return self.kv_cache_manager.explain_miss(request)
        answer = self.kv_cache_manager.explain_admission(request_id)
        if answer is None:
            raise InvalidRequestError(
                f"{request_id=} is neither an unfinished nor a recently admitted request.",
                param="request_id",
            )
        return answer

    def make_stats(self, *, count_slots: bool = True) -> SchedulerStats:
        """A snapshot of the scheduler's counters; the runner's counters are 0.

        Args:
            count_slots: Count used slots, in O(running requests). If False, repeat the last count.
        """
        if count_slots:
            self._slot_counts = self.kv_cache_manager.count_slots(self._holders())
        return make_scheduler_stats(
            self.kv_cache_manager,
            self.metrics_collector,
            self.draft_counts,
            slot_counts=self._slot_counts,
            num_running_reqs=len(self.running),
            num_waiting_reqs=len(self.waiting),
            num_preemptions=self.num_preemptions,
            num_steps=self.num_steps,
            num_scheduled_tokens=self.num_scheduled_tokens,
        )

    def may_schedule_nothing(self) -> bool:
        """Whether `schedule` may schedule no token although there are unfinished requests.

        Requests may wait for a step in flight, the connector, a transfer or a grammar. Call it
        after `schedule`.
        """
        return (
            len(self.steps_in_flight) > 0
            or self._is_connector_undecided
            or (self.remote_kv is not None and self.remote_kv.has_transfers())
            or any(request.status is RequestStatus.WAITING_FOR_FSM for request in self.waiting)
        )

    def check_invariants(self) -> None:
        """Checks the block pool, the block tables and the queues, in O(n).

        Raises:
            InvariantError: A rule is broken.
        """
        self.kv_cache_manager.check_invariants()
        self.encoder_inputs.cache_manager.check_invariants(self.requests)
        check_requests(
            self.requests,
            self.running,
            self.waiting,
            self.steps_in_flight.count_unknown_tokens(),
            has_connector=self.remote_kv is not None,
        )
        delayed = () if self.remote_kv is None else self.remote_kv.delayed.values()
        check_blocks(
            self.kv_cache_manager, self.running, self.waiting, (*self.kept_requests, *delayed)
        )
        if len(self.running) > self.scheduler_config.max_num_seqs:
            raise InvariantError(
                f"{len(self.running)} requests run; max_num_seqs is "
                f"{self.scheduler_config.max_num_seqs}."
            )

    def close(self) -> None:
        """Does nothing: a scheduler holds only memory. `TraceRecorder` ends its trace here.

        No method may be called afterwards.
        """

    def _build_output(self, plan: StepPlan, requests: dict[str, Request]) -> SchedulerOutput:
        """Builds the message to the runner. Must run before `_advance`."""
        num_common_prefix_blocks: list[int] = []
        if self._count_common_prefix_blocks and self.running:
            num_common_prefix_blocks = self.kv_cache_manager.get_num_common_prefix_blocks(
                self.running[0].request_id
            )
        output = plan.build_output(
            requests,
            manager=self.kv_cache_manager,
            encoder_inputs=self.encoder_inputs,
            remote_kv=self.remote_kv,
            reset_req_ids=self._reset_req_ids,
            finished_req_ids=self.finished_req_ids,
            num_common_prefix_blocks=num_common_prefix_blocks,
        )
        self.finished_req_ids.clear()
        self._reset_req_ids.clear()
        return output

    def _advance(self, output: SchedulerOutput, requests: dict[str, Request]) -> None:
        """Counts the step's tokens as computed, before the step runs.

        Steps run in order, so the step's K and V are written before any later step reads them.
        """
        for req_id, num_tokens in output.num_scheduled_tokens.items():
            requests[req_id].num_computed_tokens += num_tokens
        self.encoder_inputs.end_step()
        self.steps_in_flight.add(output, requests)
        self.num_steps += 1 if requests else 0
        self.num_scheduled_tokens += output.total_num_scheduled_tokens

    def _append_step_tokens(
        self,
        requests: dict[str, Request],
        scheduler_output: SchedulerOutput,
        runner_output: ModelRunnerOutput,
    ) -> tuple[list[EngineCoreOutput], list[Request]]:
        """Appends a step's tokens; returns the outputs and the finished requests."""
        is_burst = scheduler_output.num_decode_steps > 1
        num_scheduled_tokens = scheduler_output.num_scheduled_tokens
        drafts = scheduler_output.scheduled_spec_decode_tokens
        # With drafts, the number of computed tokens depends on how many drafts were accepted. The
        # states that a burst saved enter the prefix cache now, which the fast path does not do.
        plain = {} if drafts else requests
        if scheduler_output.slot_switches:
            plain = {
                req_id: request
                for req_id, request in plain.items()
                if req_id not in scheduler_output.slot_switches
            }
        outputs, places = append_plain(
            plain, runner_output, num_scheduled_tokens if is_burst else None
        )
        finished: list[Request] = []
        for place in places:
            req_id, token_ids = runner_output.req_ids[place], runner_output.sampled_token_ids[place]
            if req_id not in num_scheduled_tokens:
                raise InvariantError(f"{req_id=} was computed but not scheduled.")
            request = requests.get(req_id)
            pooled = runner_output.pooler_output.get(req_id)
            if request is not None and pooled is not None:
                outputs[place] = end_pooled(request, pooled)
                finished.append(request)
                continue
            # A burst samples tokens for every request. `finish_burst` raises if there are none.
            if request is None or (not token_ids and not is_burst):
                if request is not None and req_id in drafts:
                    # The step sampled no token after the request's last one, so the request would
                    # not continue. Preempt it, to compute it again.
                    self._step_scheduler.preempt_running(request)
                    self._reset_req_ids.add(req_id)
                continue
            num_drafts = len(drafts.get(req_id, ()))
            num_rejected = num_rejected_tokens(num_drafts, len(token_ids))
            request.num_computed_tokens -= num_rejected
            if request.num_computed_tokens < request.num_tokens:
                raise InvariantError(f"{request!r} got a token before its tokens were computed.")
            if self._recomputes_drafts:
                request.num_computed_tokens -= num_drafts - num_rejected
            num_wanted = num_scheduled_tokens[req_id] if is_burst else 1
            logprobs = runner_output.logprobs[place]
            output = self._append_tokens(request, token_ids, logprobs, num_wanted)
            if num_drafts > 0:
                num_accepted = num_drafts - num_rejected
                self.draft_counts.record(num_drafts, num_accepted)
                output = msgspec.structs.replace(
                    output, num_draft_tokens=num_drafts, num_accepted_tokens=num_accepted
                )
            if output.finish_reason is not None:
                # In a burst, the device may have computed tokens after the last one.
                has_one_left = request.num_computed_tokens == request.num_tokens - 1
                request.has_final_state = has_one_left and not is_burst
                finished.append(request)
            if is_burst:
                self._decode_bursts.finish_burst(request, len(token_ids), num_wanted)
            outputs[place] = output
        if places:
            outputs = [output for output in outputs if output is not None]
        return outputs, finished

    def _count_burst_drafts(
        self,
        outputs: list[EngineCoreOutput],
        burst_drafts: Mapping[str, Sequence[tuple[int, int]]],
    ) -> list[EngineCoreOutput]:
        """Counts the drafts of a burst, for requests that got tokens, and adds them to outputs."""
        counted = []
        for output in outputs:
            steps = burst_drafts.get(output.request_id, ())
            for num_drafts, num_accepted in steps:
                self.draft_counts.record(num_drafts, num_accepted)
            if steps:
                output = msgspec.structs.replace(
                    output,
                    num_draft_tokens=sum(num_drafts for num_drafts, _ in steps),
                    num_accepted_tokens=sum(num_accepted for _, num_accepted in steps),
                )
            counted.append(output)
        return counted

    def _append_tokens(
        self,
        request: Request,
        token_ids: list[int],
        logprobs: list[TokenLogprobs] | None,
        num_wanted: int,
    ) -> EngineCoreOutput:
        """Appends a step's tokens. `AsyncScheduler` overrides this and uses `num_wanted`."""
        return append_until_stop(request, token_ids, logprobs)

    def _end_requests(self, finished: list[Request]) -> None:
        """Removes finished requests, except from the waiting queue, which is the caller's task."""
        if not finished:
            return
        for request in finished:
            self._end_request(request)
        self._step_scheduler.remove_finished()

    def _end_request(self, request: Request) -> None:
        """Frees the request's blocks, unless they are kept for forks or used by a transfer."""
        # See `StepScheduler.preempt`.
        request.num_computed_tokens = self.steps_in_flight.num_sure_tokens(request)
        is_delayed = self.remote_kv is not None and self.remote_kv.must_delay_free(request)
        if not is_delayed:
            if request.keep_blocks and request.finish_reason in ("stop", "length"):
                self.kept_requests.add(request)
            else:
                self.kv_cache_manager.free(request)
        self.encoder_inputs.release(request)
        self.steps_in_flight.discard(request)
        del self.requests[request.request_id]
        self.finished_req_ids.add(request.request_id)
        self._reset_req_ids.discard(request.request_id)

    def _holders(self) -> Iterator[Request]:
        """Every request that holds blocks."""
        yield from self.running
        yield from self.kept_requests
        if self.remote_kv is not None:
            yield from self.waiting
            yield from self.remote_kv.delayed.values()
