"""SchedulerMachine: runs the scheduler and SlowScheduler on the same random requests and settings.

Each step is predicted: which requests run, with how many tokens, from which position, with which
drafts, which are preempted, their blocks, and the free blocks after it. Each step is then executed
on a memory that records what every slot holds. Each request must get the same tokens as alone.
"""

import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import InvalidRequestError, NeverFitsError
from paxkv.scheduler.scheduler import Scheduler
from tests.slow_model.kv_memory import chain
from tests.slow_model.slow_connector import SlowConnector
from tests.slow_model.slow_request import SlowRequest
from tests.slow_model.slow_runner import SlowRunner, next_token
from tests.slow_model.slow_scheduler import SlowScheduler
from tests.slow_model.specs import full, make_config

MAX_MODEL_LEN = 30
EOS = 5


def expected_output(request, params):
    """Tokens and finish reason of a request that runs alone: no schedule, no blocks, no batch."""
    token_ids, output = list(request.prompt_token_ids), []
    while True:
        output.append(next_token(chain(token_ids + output, request.cache_salt)[-1]))
        if output[-1] == EOS and not params.ignore_eos:
            return output, "stop", None
        if output[-1] in (params.stop_token_ids or ()):
            return output, "stop", output[-1]
        if len(output) == params.max_tokens or len(token_ids + output) == MAX_MODEL_LEN:
            return output, "length", None


class SchedulerMachine(RuleBasedStateMachine):
    POLICY = "fcfs"
    KINDS = ((full(2),), (full(4),))
    SCHEDULER = Scheduler
    # Steps scheduled before the tokens of the oldest one are returned.
    NUM_STEPS_IN_FLIGHT = 1
    # Share of examples with so few requests, each with many tokens, that many steps are bursts.
    QUIET_SHARE = 0.1

    @initialize(data=st.data(), seed=st.integers(0, 2**32))
    def start(self, data, seed):
        self.kinds = data.draw(st.sampled_from(self.KINDS))
        self.draw = random.Random(seed)
        draw = self.draw
        caching = draw.random() < 0.75
        self.is_quiet = draw.random() < self.QUIET_SHARE
        num_pool_tokens = draw.randint(20, 90 if self.is_quiet else 60)
        num_blocks = 1 + sum(
            draw.randint(1, 4) * kind.size
            if kind.name == "state"
            else -(-num_pool_tokens // kind.block_size)
            for kind in self.kinds
        )
        self.max_num_seqs = draw.randint(2, 5)
        # Often so small that a prompt takes several steps and leaves little for other requests.
        self.budget = draw.choice([draw.randint(self.max_num_seqs, 8), draw.randint(6, 40)])
        has_states = any(kind.name == "state" for kind in self.kinds)
        self.num_drafts = draw.choice([0, 0, 2])
        is_async = self.NUM_STEPS_IN_FLIGHT > 1
        samples_one = self.num_drafts or is_async or self.is_quiet
        self.tokens_per_sample = 1 if samples_one else draw.choice([1, 1, 3])
        use_eagle = draw.random() < 0.3 and not has_states
        settings = dict(
            policy=self.POLICY,
            max_num_seqs=self.max_num_seqs,
        )
        threshold = draw.choice([0, 0, 3, 8])
        chunked = draw.random() < 0.7
        must_fit = draw.random() < 0.6
        state_share = draw.choice([1, 1, 0.5, 0.3])
        state_interval = draw.choice([None, None, 1, 7])
        has_connector = draw.random() < 0.4 and not self.is_quiet and not has_states
        self.connector = SlowConnector() if has_connector else None
        self.real = self.SCHEDULER(
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=self.budget,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=threshold,
                full_sequence_must_fit=must_fit,
                **settings,
            ),
            cache_config=CacheConfig(
                enable_prefix_caching=caching,
                prefix_caching_seed="test",
                state_cache_share=state_share,
                state_save_interval=state_interval,
            ),
            kv_cache_config=make_config(self.kinds, num_blocks),
            max_model_len=MAX_MODEL_LEN,
            num_lookahead_tokens=self.num_drafts,
            connector=self.connector,
            use_eagle=use_eagle,
        )
        self.slow = SlowScheduler(
            self.kinds,
            num_blocks,
            max_model_len=MAX_MODEL_LEN,
            caching=caching,
            budget=self.budget,
            chunked=chunked,
            threshold=threshold,
            must_fit=must_fit,
            lookahead=self.num_drafts,
            use_eagle=use_eagle,
            is_async=is_async,
            has_connector=self.connector is not None,
            state_share=state_share,
            state_interval=state_interval or 0,
            **settings,
        )
        self.runner = SlowRunner(self.kinds, num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN)
        if self.connector is not None:
            self.runner.tokens_to_load = self.connector.tokens_to_load
        self.num_usable_blocks = num_blocks - 1
        self.live = {}
        self.outputs = {}
        self.in_flight = []
        self.num_requests = 0

    # -- arrivals and ends ------------------------------------------------------------------

    @rule(seed=st.integers(0, 2**32), num_requests=st.integers(1, 5))
    def add(self, seed, num_requests):
        draw = random.Random(seed)
        for _ in range(self.num_to_add(num_requests)):
            self.num_requests += 1
            start = [0, 1, 2, 3] * draw.choice([0, 1, 2, 5])
            rest = [draw.randrange(2) for _ in range(draw.randint(1, 8))]
            self.add_request(self.engine_request(draw, start + rest))

    @precondition(lambda self: self.live or self.slow.kept)
    @rule(seed=st.integers(0, 2**32), num_requests=st.integers(1, 3))
    def fork(self, seed, num_requests):
        """Adds requests that begin with the tokens another request has so far."""
        draw = random.Random(seed)
        source = self.slow.find(draw.choice(sorted({*self.live, *self.slow.kept})))
        length = draw.randint(1, len(source.tokens))
        rest = [draw.randrange(2) for _ in range(draw.randint(1, 3))]
        tokens = (source.tokens[:length] + rest)[: MAX_MODEL_LEN - 2]
        for _ in range(self.num_to_add(num_requests)):
            self.num_requests += 1
            self.add_request(
                self.engine_request(
                    draw, tokens, cache_salt=source.scope, fork_from=source.request_id
                )
            )

    def num_to_add(self, num_requests):
        return min(num_requests, max(0, 3 - len(self.live))) if self.is_quiet else num_requests

    def engine_request(self, draw, tokens, **options):
        options.setdefault("cache_salt", draw.choice([None, None, None, "tenant"]))
        return EngineRequest(
            request_id=f"r{self.num_requests}",
            prompt_token_ids=tokens,
            sampling_params=SamplingParams(
                max_tokens=draw.choice([10, 20] if self.is_quiet else [1, 4, 10, 20]),
                stop_token_ids=draw.choice([None, None, [3]]),
                ignore_eos=draw.random() < 0.5,
                skip_reading_prefix_cache=draw.random() < 0.1,
            ),
            eos_token_ids=(EOS,),
            arrival_time=float(self.num_requests // 2),
            # Often more urgent than all earlier requests: then it may preempt them.
            priority=draw.choice([0, 1, -self.num_requests, -self.num_requests]),
            keep_blocks=draw.random() < (0.4 if self.is_quiet else 0.1),
            num_leading_tokens=draw.choice([0, draw.randint(0, len(tokens))]),
            **options,
        )

    def add_request(self, request):
        params = request.sampling_params
        num_prompt = len(request.prompt_token_ids)
        num_slots = min(num_prompt + params.max_tokens, MAX_MODEL_LEN) - 1 + self.num_drafts
        most_blocks = sum(
            kind.size if kind.name == "state" else -(-num_slots // kind.block_size) + 1
            for kind in self.kinds
        )
        plan = self.make_plan(request)
        if self.connector is not None:
            self.connector.plans[request.request_id] = plan
        try:
            self.real.add_request(request)
        except NeverFitsError:
            assert most_blocks > self.num_usable_blocks
            return
        except InvalidRequestError:
            assert num_prompt > self.budget or num_prompt >= MAX_MODEL_LEN
            return
        self.slow.add(plan)
        self.live[request.request_id] = request
        self.outputs[request.request_id] = []
        self.runner.scope_of[request.request_id] = request.cache_salt

    def make_plan(self, request):
        params = request.sampling_params
        draw = random.Random(request.request_id)
        num_prompt = len(request.prompt_token_ids)
        external = 0
        if self.connector is not None:
            external = draw.choice([0, 0, None, draw.randint(1, num_prompt)])
        return SlowRequest(
            request_id=request.request_id,
            tokens=list(request.prompt_token_ids),
            num_prompt=num_prompt,
            scope=request.cache_salt,
            max_tokens=min(num_prompt + params.max_tokens, MAX_MODEL_LEN),
            stop_at=frozenset(params.stop_token_ids or ())
            | (set() if params.ignore_eos else {EOS}),
            priority=request.priority,
            arrival=request.arrival_time,
            skips_reading=params.skip_reading_prefix_cache,
            fork_from=request.fork_from,
            keep_blocks=request.keep_blocks,
            num_leading=request.num_leading_tokens,
            external=external,
            # A preempted request loses its tokens in flight. In a pool this small, a request whose
            # blocks are always taken for other requests' loads would lose every token.
            is_async=draw.random() < 0.5 and self.NUM_STEPS_IN_FLIGHT == 1,
        )

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), reuse_id=st.booleans())
    def abort(self, which, reuse_id):
        self.abort_request(sorted(self.live)[which % len(self.live)], reuse_id)

    def abort_request(self, req_id, reuse_id):
        request = self.live.pop(req_id)
        self.real.finish_requests([req_id, "unknown"], "abort")
        self.slow.abort(req_id)
        if reuse_id and req_id not in self.slow.loading_after_end:
            self.add_request(request)

    @rule(reset_running=st.booleans())
    def reset(self, reset_running):
        assert self.real.reset_prefix_cache(reset_running) == self.slow.reset(reset_running)

    @rule()
    def connector_decides(self):
        for request in (*self.slow.running, *self.slow.waiting):
            if request.external is None:
                request.external = len(request.tokens) // 2

    # -- steps ------------------------------------------------------------------------------

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 6), load_done=st.booleans())
    def step(self, num_steps, load_done):
        for _ in range(num_steps):
            if self.live:
                self.run_step(load_done=load_done)

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100), reuse_id=st.booleans())
    def step_with_an_abort_while_it_runs(self, which, reuse_id):
        self.run_step(sorted(self.live)[which % len(self.live)], reuse_id)

    def run_step(self, req_id_to_abort=None, reuse_id=False, load_done=True):
        max_decode_steps = self.draw.choice([1, 2, 3, 8])
        output = self.real.schedule(max_decode_steps)
        self.check_prediction(output, self.slow.schedule(max_decode_steps))
        self.real.check_invariants()
        if req_id_to_abort is not None and not reuse_id:
            self.abort_request(req_id_to_abort, reuse_id)
        runner_output = self.runner.execute(
            output,
            draw=self.draw,
            num_drafts=self.num_drafts,
            tokens_per_sample=self.tokens_per_sample,
            load_done=load_done,
        )
        self.check_contents()
        self.in_flight.append((output, runner_output))
        if req_id_to_abort is not None and reuse_id:
            self.abort_request(req_id_to_abort, reuse_id)
        while len(self.in_flight) == self.NUM_STEPS_IN_FLIGHT or (
            self.in_flight and not output.num_scheduled_tokens
        ):
            self.finish_step(*self.in_flight.pop(0))

    def finish_step(self, output, runner_output):
        results = self.real.update_from_output(output, runner_output)
        sampled = dict(zip(runner_output.req_ids, runner_output.sampled_token_ids, strict=True))
        expected = self.slow.update(sampled, runner_output.draft_token_ids)
        if runner_output.kv_connector_output is not None:
            self.slow.loaded(runner_output.kv_connector_output.finished_recving)
        self.check_results(results, expected)
        self.is_the_same()

    def check_prediction(self, output, step):
        assert output.num_scheduled_tokens == step.num_scheduled
        assert output.total_num_scheduled_tokens == sum(step.num_scheduled.values())
        assert output.num_decode_steps == step.num_decode_steps
        if step.num_decode_steps == 1:
            assert output.total_num_scheduled_tokens <= self.budget
        assert len(step.num_scheduled) <= self.max_num_seqs
        assert output.scheduled_spec_decode_tokens == step.drafts
        assert output.preempted_req_ids == set(step.preempted)
        assert [new.req_id for new in output.scheduled_new_reqs] == step.new
        cached = output.scheduled_cached_reqs
        assert cached.resumed_req_ids == set(step.resumed)
        assert set(cached.req_ids) | set(step.new) == set(step.num_scheduled)
        computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        computed |= {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        assert computed == step.computed_before
        copies = [(c.source_block_id, c.target_block_id) for c in output.block_copies]
        assert copies == self.slow.kv.copies
        self.slow.kv.copies = []
        assert output.slot_switches == step.slot_switches
        self.is_the_same()
        if not step.num_scheduled:
            assert all(not self.may_run(request) for request in self.slow.waiting)

    def may_run(self, request):
        """Whether the scheduler has no reason to leave it waiting in a step where none runs."""
        if self.in_flight:
            return False
        is_loading = any(r.status == "remote" and not r.is_loaded for r in self.slow.waiting)
        if is_loading or self.slow.loading_after_end:
            return False  # requests being loaded may hold the blocks it needs
        return request.external is not None and not self.slow.waits_for_source(request)

    def check_results(self, results, expected):
        got = {r.request_id: (list(r.new_token_ids), r.finish_reason) for r in results}
        assert got == expected
        for result in results:
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason is not None:
                request = self.live.pop(result.request_id)
                assert expected_output(request, request.sampling_params) == (
                    self.outputs[result.request_id],
                    result.finish_reason,
                    result.stop_reason,
                )
                assert result.num_cached_tokens < len(request.prompt_token_ids)

    def check_contents(self):
        """Each cached block has been written and holds the content that its key names."""
        for (group, scope, tokens), block_id in self.slow.kv.pool.cached:
            i = len(tokens) // self.kinds[group].block_size - 1
            assert self.runner.memory.holds(group, block_id, chain(tokens, scope), i)

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "live"):
            return
        self.real.check_invariants()
        assert [r.request_id for r in self.real.running] == [
            r.request_id for r in self.slow.running
        ]
        assert [r.request_id for r in self.real.waiting] == [
            r.request_id for r in self.slow.waiting
        ]
        assert set(self.real.requests) == set(self.live)
        manager, kv = self.real.kv_cache_manager, self.slow.kv
        for req_id, tables in kv.tables.items():
            assert list(manager.get_block_ids(req_id)) == tables
        pool = manager.block_pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert free == kv.pool.free
        assert [block.ref_cnt for block in pool.blocks] == list(kv.pool.refs.values())
        self.check_stats()
        found = {b.block_id for _, b in pool.cached_block_hash_to_block.items()}
        assert found == {block_id for _, block_id in kv.pool.cached}
        for request in self.slow.running:
            real = self.real.requests[request.request_id]
            assert real.num_computed_tokens == request.num_computed
            assert real.all_token_ids == request.tokens

    def check_stats(self):
        stats, kv = self.real.make_stats(), self.slow.kv
        assert stats.num_running_reqs == len(self.slow.running)
        assert stats.num_waiting_reqs == len(self.slow.waiting)
        assert stats.num_blocks - 1 - stats.num_free_blocks == sum(
            num_holders > 0 for num_holders in kv.pool.refs.values()
        )
        held = {
            (block_id, kind.block_size)
            for tables in kv.tables.values()
            for kind, table in zip(self.kinds, tables, strict=True)
            for block_id in table
            if block_id != 0 and kind.name != "state"
        }
        assert stats.num_allocated_slots == sum(block_size for _, block_size in held)
        assert 0 <= stats.num_used_slots <= stats.num_allocated_slots

    def teardown(self):
        if not hasattr(self, "live"):
            return
        self.connector_decides()
        # A request needs at most one step per token; preemption repeats some of them.
        for _ in range(100 + 10 * MAX_MODEL_LEN * len(self.live)):
            if not self.live and not self.slow.loading_after_end and not self.in_flight:
                break
            self.run_step()
        while self.in_flight:
            self.finish_step(*self.in_flight.pop(0))
        assert not self.live, "requests that never finish"
        for req_id in list(self.slow.kept):
            self.real.finish_requests([req_id], "abort")
            self.slow.abort(req_id)
        assert not self.real.has_unfinished_requests()
        assert self.real.make_stats().kv_cache_usage == 0
        assert self.real.reset_prefix_cache()
        self.real.check_invariants()
