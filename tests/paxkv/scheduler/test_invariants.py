"""The scheduler against a slow runner that keeps the KV memory itself, token by token."""

import dataclasses
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.errors import InvalidRequestError, InvariantError, NeverFitsError
from paxkv.kv_cache.block_hash import get_block_hash
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.invariants import check_requests
from paxkv.scheduler.request import Request, RequestStatus
from paxkv.scheduler.scheduler import Scheduler

MAX_MODEL_LEN = 30
VOCAB_SIZE = 20
EOS = 5
SALTS = (None, "tenant")


def contents(token_ids, salt):
    """What the slot of each token holds: like a key or value, it depends on the whole prefix."""
    chain = [SALTS.index(salt)]
    for token_id in token_ids:
        chain.append(hash((chain[-1], token_id)))
    return chain[1:]


def next_token(content):
    """The model: the token after a prefix is a function of what the cache holds for it."""
    return content % 9973 % VOCAB_SIZE


def expected_output(request):
    """Tokens and finish reason by the rules alone: no schedule, no blocks, no batch."""
    token_ids, params = list(request.prompt_token_ids), request.sampling_params
    output = []
    while True:
        output.append(next_token(contents(token_ids + output, request.cache_salt)[-1]))
        if output[-1] == EOS and not params.ignore_eos:
            return output, "stop", None
        if output[-1] in (params.stop_token_ids or ()):
            return output, "stop", output[-1]
        if len(output) == params.max_tokens or len(token_ids + output) == MAX_MODEL_LEN:
            return output, "length", None


@dataclasses.dataclass
class Row:
    """One request as the runner knows it."""

    token_ids: list
    num_prompt_tokens: int
    tables: list
    num_computed_tokens: int
    salt: str | None


class SlowRunner:
    """Writes and reads KV memory as told, and fails when a read is not what it should be."""

    def __init__(self, *, block_size, num_blocks, tokens_per_sample):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.tokens_per_sample = tokens_per_sample
        self.salt_of = {}
        self.rows = {}
        self.memory = {}

    def execute(self, output):
        self.update_rows(output)
        for step in (self.write, self.read):  # all writes of a layer come before its reads
            step(output.num_scheduled_tokens)
        sampled = []
        req_ids = list(output.num_scheduled_tokens)[::-1]
        for req_id in req_ids:
            row = self.rows[req_id]
            row.num_computed_tokens += output.num_scheduled_tokens[req_id]
            assert row.num_computed_tokens <= min(len(row.token_ids), MAX_MODEL_LEN - 1)
            sampled.append([])
            if row.num_computed_tokens == len(row.token_ids):
                for _ in range(self.tokens_per_sample):
                    sampled[-1].append(next_token(contents(row.token_ids, row.salt)[-1]))
                    row.token_ids.append(sampled[-1][-1])
        return ModelRunnerOutput(
            req_ids=req_ids, sampled_token_ids=sampled, logprobs=[None] * len(req_ids)
        )

    def update_rows(self, output):
        for req_id in output.finished_req_ids:
            self.rows.pop(req_id, None)
        for req_id in output.preempted_req_ids:
            del self.rows[req_id]
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.rows
            self.rows[new.req_id] = Row(
                list(new.prompt_token_ids),
                len(new.prompt_token_ids),
                [list(table) for table in new.block_ids],
                new.num_computed_tokens,
                self.salt_of[new.req_id],
            )
        cached = output.scheduled_cached_reqs
        assert set(cached.all_token_ids) == cached.resumed_req_ids
        for i, req_id in enumerate(cached.req_ids):
            new_block_ids = cached.new_block_ids[i]
            if req_id in cached.resumed_req_ids:
                token_ids = list(cached.all_token_ids[req_id])
                num_prompt_tokens = len(token_ids) - cached.num_output_tokens[i]
                tables = [list(table) for table in new_block_ids]
                salt = self.salt_of[req_id]
                computed = cached.num_computed_tokens[i]
                self.rows[req_id] = Row(token_ids, num_prompt_tokens, tables, computed, salt)
            elif new_block_ids is not None:
                assert any(new_block_ids)
                for table, new in zip(self.rows[req_id].tables, new_block_ids, strict=True):
                    table += new
            row = self.rows[req_id]
            # Positions are scheduled one after the other, without a gap or a repetition.
            assert cached.num_computed_tokens[i] == row.num_computed_tokens
            assert cached.num_output_tokens[i] == len(row.token_ids) - row.num_prompt_tokens

    def slots(self, row, start, end):
        for table in row.tables:
            for position in range(start, end):
                block_id = table[position // self.block_size]
                assert 0 < block_id < self.num_blocks
                yield position, (block_id, position % self.block_size)

    def write(self, num_scheduled_tokens):
        written = set()
        for req_id, num_tokens in num_scheduled_tokens.items():
            row = self.rows[req_id]
            start = row.num_computed_tokens
            content = contents(row.token_ids, row.salt)
            for position, slot in self.slots(row, start, start + num_tokens):
                assert slot not in written, "two tokens in one slot"
                written.add(slot)
                self.memory[slot] = content[position]

    def read(self, num_scheduled_tokens):
        for req_id, num_tokens in num_scheduled_tokens.items():
            row = self.rows[req_id]
            content = contents(row.token_ids, row.salt)
            for position, slot in self.slots(row, 0, row.num_computed_tokens + num_tokens):
                assert self.memory.get(slot) == content[position], "not this request's KV"


class SchedulerMachine(RuleBasedStateMachine):
    """Any traffic under any settings: the same tokens as alone, and progress every step."""

    POLICY = "fcfs"

    @initialize(
        caching=st.sampled_from([True, True, False]),
        chunked=st.sampled_from([True, True, False]),
        threshold=st.sampled_from([0, 3, 8]),
        num_pool_tokens=st.integers(20, 50),
        block_size=st.sampled_from([2, 4]),
        max_num_seqs=st.integers(2, 5),
        budget=st.integers(6, 40),
        tokens_per_sample=st.sampled_from([1, 1, 3]),
        num_groups=st.integers(1, 2),
    )
    def start(
        self,
        caching,
        chunked,
        threshold,
        num_pool_tokens,
        block_size,
        max_num_seqs,
        budget,
        tokens_per_sample,
        num_groups,
    ):
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32"
        )
        group = KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=spec)
        groups = (group,) * (1 if caching else num_groups)
        num_blocks = 1 + num_pool_tokens // block_size * len(groups)
        self.scheduler = Scheduler(
            scheduler_config=SchedulerConfig(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                enable_chunked_prefill=chunked,
                long_prefill_token_threshold=threshold,
                policy=self.POLICY,
            ),
            cache_config=CacheConfig(enable_prefix_caching=caching, prefix_caching_seed="test"),
            kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups),
            max_model_len=MAX_MODEL_LEN,
        )
        self.runner = SlowRunner(
            block_size=block_size, num_blocks=num_blocks, tokens_per_sample=tokens_per_sample
        )
        self.max_num_batched_tokens = budget
        self.max_num_seqs = max_num_seqs
        self.live = {}
        self.outputs = {}
        self.content_of_hash = {}
        self.num_requests = 0

    @rule(seed=st.integers(0, 2**32), num_requests=st.integers(1, 5))
    def add(self, seed, num_requests):
        draw = random.Random(seed)
        for _ in range(num_requests):
            self.num_requests += 1
            start = [0, 1, 2, 3] * draw.choice([0, 1, 2, 5])
            rest = [draw.randrange(2) for _ in range(draw.randint(1, 8))]
            self.add_request(
                EngineRequest(
                    request_id=f"r{self.num_requests}",
                    prompt_token_ids=start + rest,
                    sampling_params=SamplingParams(
                        max_tokens=draw.choice([1, 4, 10, 20]),
                        stop_token_ids=draw.choice([None, None, [3]]),
                        ignore_eos=draw.random() < 0.5,
                        skip_reading_prefix_cache=draw.random() < 0.1,
                    ),
                    eos_token_ids=(EOS,),
                    arrival_time=float(self.num_requests // 2),
                    # Often more urgent than all before: then it may take what they were given.
                    priority=draw.choice([0, 1, -self.num_requests, -self.num_requests]),
                    cache_salt=draw.choice([None, None, None, "tenant"]),
                )
            )

    def add_request(self, request):
        req_id = request.request_id
        num_slots = min(
            len(request.prompt_token_ids) + request.sampling_params.max_tokens - 1,
            MAX_MODEL_LEN - 1,
        )
        try:
            self.scheduler.add_request(request)
        except NeverFitsError:
            assert num_slots > self.scheduler.max_tokens_that_fit
        except InvalidRequestError:
            assert len(request.prompt_token_ids) > self.max_num_batched_tokens
        else:
            assert num_slots <= self.scheduler.max_tokens_that_fit
            self.live[req_id] = request
            self.outputs[req_id] = []
            self.runner.salt_of[req_id] = request.cache_salt

    @precondition(lambda self: self.live)
    @rule(num_steps=st.integers(1, 6))
    def step(self, num_steps):
        for _ in range(num_steps):
            if self.live:
                self.run_step(None, False)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reuse_id=st.booleans())
    def step_with_an_abort_while_it_runs(self, data, reuse_id):
        self.run_step(data.draw(st.sampled_from(sorted(self.live))), reuse_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), reuse_id=st.booleans())
    def abort(self, data, reuse_id):
        self.abort_request(data.draw(st.sampled_from(sorted(self.live))), reuse_id)

    def abort_request(self, req_id, reuse_id):
        request = self.live.pop(req_id)
        self.scheduler.finish_requests([req_id, "unknown"], "abort")
        if reuse_id:
            self.add_request(request)

    @rule()
    def reset(self):
        num_held = sum(
            block.ref_cnt > 0 for block in self.scheduler.kv_cache_manager.block_pool.blocks
        )
        assert self.scheduler.reset_prefix_cache() == (num_held == 0)

    def run_step(self, req_id_to_abort, reuse_id):
        output = self.scheduler.schedule()
        self.scheduler.check_invariants()
        counts = output.num_scheduled_tokens
        assert counts, "a step without progress"
        assert min(counts.values()) >= 1
        assert sum(counts.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= self.max_num_batched_tokens
        assert len(counts) <= self.max_num_seqs
        new_ids = [new.req_id for new in output.scheduled_new_reqs]
        assert sorted(new_ids + output.scheduled_cached_reqs.req_ids) == sorted(counts)
        assert not output.preempted_req_ids & set(counts)
        assert not (output.preempted_req_ids and new_ids)
        assert not self.scheduler.has_finished_requests()

        self.note_block_hashes()
        if req_id_to_abort is not None and not reuse_id:
            self.abort_request(req_id_to_abort, reuse_id)
        runner_output = self.runner.execute(output)
        self.check_cached_blocks()
        if req_id_to_abort is not None and reuse_id:
            self.abort_request(req_id_to_abort, reuse_id)
        for result in self.scheduler.update_from_output(output, runner_output):
            self.outputs[result.request_id] += result.new_token_ids
            if result.finish_reason is not None:
                request = self.live.pop(result.request_id)
                assert expected_output(request) == (
                    self.outputs[result.request_id],
                    result.finish_reason,
                    result.stop_reason,
                )
                assert result.num_cached_tokens < len(request.prompt_token_ids)

    def note_block_hashes(self):
        size = self.runner.block_size
        for request in self.scheduler.requests.values():
            content = contents(request.all_token_ids, request.cache_salt)
            for i, block_hash in enumerate(request.block_hashes):
                self.content_of_hash[block_hash] = content[i * size : (i + 1) * size]

    def check_cached_blocks(self):
        """Whatever can be hit has been written, and is what its hash says."""
        pool = self.scheduler.kv_cache_manager.block_pool
        for key, block in pool.cached_block_hash_to_block.items():
            for offset, content in enumerate(self.content_of_hash[get_block_hash(key)]):
                assert self.runner.memory.get((block.block_id, offset)) == content

    @invariant()
    def scheduler_is_sound(self):
        self.scheduler.check_invariants()
        assert set(self.scheduler.requests) == set(self.live)
        assert self.scheduler.num_unfinished_requests() == len(self.live)
        stats = self.scheduler.make_stats()
        assert stats.num_running_reqs + stats.num_waiting_reqs == len(self.live)
        running = self.scheduler.running
        held = [
            {block_id: i for i, block_id in enumerate(table)}
            for request in running
            for table in self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ]
        num_held_blocks = len({block_id for table in held for block_id in table})
        assert stats.num_allocated_slots == num_held_blocks * self.runner.block_size
        assert stats.num_free_blocks == stats.num_blocks - 1 - num_held_blocks
        assert 0 <= stats.num_used_slots <= stats.num_allocated_slots

    def teardown(self):
        if not hasattr(self, "live"):
            return
        # Alone, each request takes a step for each of its tokens; preemption repeats some.
        max_num_steps = 100 + 10 * MAX_MODEL_LEN * len(self.live)
        for _ in range(max_num_steps):
            if not self.live:
                break
            self.run_step(None, False)
        assert not self.live, "requests that never finish"
        assert not self.scheduler.has_unfinished_requests()
        assert self.scheduler.make_stats().kv_cache_usage == 0
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.check_invariants()


class PriorityMachine(SchedulerMachine):
    POLICY = "priority"


def quick(num_examples):
    return settings(
        max_examples=num_examples,
        stateful_step_count=40,
        derandomize=True,
        database=None,
        deadline=None,
    )


class TestFCFS(SchedulerMachine.TestCase):
    settings = quick(80)


class TestPriority(PriorityMachine.TestCase):
    settings = quick(100)


@pytest.mark.slow
class TestFCFSForLong(SchedulerMachine.TestCase):
    settings = settings(quick(1500), stateful_step_count=100)


@pytest.mark.slow
class TestPriorityForLong(PriorityMachine.TestCase):
    settings = settings(quick(1500), stateful_step_count=100)


def make_request(status, *, num_computed_tokens=0, num_prompt_tokens=4):
    request = Request(
        EngineRequest(
            request_id="r",
            prompt_token_ids=[1] * num_prompt_tokens,
            sampling_params=SamplingParams(),
        ),
        max_num_tokens=8,
    )
    request.status = status
    request.num_computed_tokens = num_computed_tokens
    return request


@pytest.mark.parametrize("computed", [1, 4])
def test_a_running_request_passes(computed):
    request = make_request(RequestStatus.RUNNING, num_computed_tokens=computed)
    check_requests({"r": request}, [request], [])


@pytest.mark.parametrize("status", [RequestStatus.WAITING, RequestStatus.PREEMPTED])
def test_a_waiting_request_passes(status):
    request = make_request(status)
    check_requests({"r": request}, [], [request])


@pytest.mark.parametrize(
    ("status", "num_computed_tokens", "num_prompt_tokens"),
    [
        (RequestStatus.WAITING, 1, 4),
        (RequestStatus.RUNNING, 0, 4),
        (RequestStatus.RUNNING, 5, 4),
        (RequestStatus.RUNNING, 1, 8),
        (RequestStatus.FINISHED_STOPPED, 4, 4),
    ],
)
def test_a_running_request_in_no_possible_state_is_seen(
    status, num_computed_tokens, num_prompt_tokens
):
    request = make_request(
        status, num_computed_tokens=num_computed_tokens, num_prompt_tokens=num_prompt_tokens
    )
    with pytest.raises(InvariantError):
        check_requests({"r": request}, [request], [])


def test_a_waiting_request_that_holds_tokens_or_runs_is_seen():
    for request in (
        make_request(RequestStatus.PREEMPTED, num_computed_tokens=1),
        make_request(RequestStatus.RUNNING),
    ):
        with pytest.raises(InvariantError):
            check_requests({"r": request}, [], [request])


def test_lost_and_doubled_and_foreign_requests_are_seen():
    request = make_request(RequestStatus.WAITING)
    for known, waiting in (
        ({"r": request}, []),
        ({"r": request}, [request, request]),
        ({"r": request}, [make_request(RequestStatus.WAITING)]),
        ({}, [request]),
    ):
        with pytest.raises(InvariantError):
            check_requests(known, [], waiting)
