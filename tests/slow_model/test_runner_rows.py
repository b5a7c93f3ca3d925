"""The runner's rows and buffers with the real scheduler: every token is read from its own slots.

Steady decode has shortcuts in both: tokens that are only counted, rows that are written late,
bursts that repeat the previous one. With and without them all decisions are equal, and each
request gets the tokens that it gets alone.
"""

import random
from collections import Counter, deque

import msgspec
import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.runner_config import RunnerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from paxkv.contracts.observation import BlockResidency
from paxkv.errors import InvalidRequestError
from paxkv.runner.batch.batch_builder import BatchBuilder
from paxkv.runner.batch.burst_repeater import BurstRepeater
from paxkv.runner.batch.device_step import DeviceStep
from paxkv.runner.batch.input_batch import InputBatch
from paxkv.runner.features.prompt_logprobs import PromptLogprobs
from paxkv.runner.memory.kv_cache_groups import make_kv_cache_groups
from paxkv.runner.shapes.step_buckets import StepBuckets
from paxkv.scheduler import scheduler as scheduler_module
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.request import Request
from paxkv.scheduler.scheduler import Scheduler
from tests.slow_model.row_device import (
    EMPTY_TEXT,
    STATE,
    VOCAB_SIZE,
    RowDevice,
    next_token,
    text_with,
)

EOS = 5


def make_spec(window, block_size):
    fields = {"block_size": block_size, "num_kv_heads": 1, "dtype": "float32"}
    fields["head_size"] = 64 // block_size  # so that pages of all groups have equal bytes
    if window == STATE:
        return MambaSpec(
            block_size=block_size, page_bytes=512, state_bytes=512, blocks_per_state=1, num_parts=3
        )
    if window is None:
        return FullAttentionSpec(**fields)
    return SlidingWindowSpec(sliding_window=window, **fields)


def tokens_alone(request, max_model_len):
    """Tokens and finish reason of a request that runs alone."""
    params, text, token_ids = request.sampling_params, EMPTY_TEXT, []
    for token_id in request.prompt_token_ids:
        text = text_with(text, token_id)
    ending = {*(() if params.ignore_eos else (EOS,)), *(params.stop_token_ids or ())}
    while True:
        token_ids.append(next_token(text))
        if token_ids[-1] in ending and len(token_ids) >= params.min_tokens:
            return token_ids, "stop"
        num_tokens = len(request.prompt_token_ids) + len(token_ids)
        if len(token_ids) == params.max_tokens or num_tokens == max_model_len:
            return token_ids, "length"
        text = text_with(text, token_ids[-1])


class Traffic:
    """Random settings, requests, aborts and resets, all determined by the seed.

    Attributes:
        decisions: All scheduler outputs, results and stats, to compare with another run.
    """

    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        block_size = draw.choice([2, 4, 8])
        windows, sizes = draw.choice(
            [
                ((None,), (1,)),
                ((None, 6), (1, 1)),
                # Two groups with blocks of one size, and one whose blocks are twice as long.
                ((None, 6, None), (1, 1, 2)),
                ((6, None), (2, 1)),
                ((5,), (1,)),
                ((None, STATE), (1, 1)),
                ((6, None, STATE), (1, 2, 2)),
                ((STATE,), (1,)),
            ]
        )
        block_sizes = [block_size * size for size in sizes]
        self.max_model_len = draw.choice([30, 60])
        max_num_seqs = draw.choice([2, 4, 8])
        self.max_decode_burst = draw.choice([1, 4, 8])
        is_async = draw.random() < 0.6
        self.num_steps_in_flight = draw.choice([2, 3]) if is_async else 1
        num_needed = sum(
            3 if window == STATE else -(-self.max_model_len // size)
            for window, size in zip(windows, block_sizes, strict=True)
        )
        num_blocks = 1 + draw.choice([num_needed + 2, num_needed * max_num_seqs])
        scheduler_config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=draw.choice([max_num_seqs, 16, 64]),
            policy=draw.choice(["fcfs", "priority"]),
        )
        specs = {
            f"layer{idx}": make_spec(window, size)
            for idx, (window, size) in enumerate(zip(windows, block_sizes, strict=True))
        }
        groups = make_kv_cache_groups(specs)
        # Each layer is a group of its own, in the order of the layers.
        assert [group.layer_names for group in groups.kv_cache_groups] == [(n,) for n in specs]
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            scheduler_config=scheduler_config,
            cache_config=CacheConfig(
                enable_prefix_caching=draw.random() < 0.75, prefix_caching_seed="test"
            ),
            kv_cache_config=groups.config(num_blocks),
            max_model_len=self.max_model_len,
        )
        dims = {
            "max_num_seqs": max_num_seqs,
            "max_model_len": self.max_model_len,
            "tables": groups.tables(self.max_model_len),
        }
        self.rows = InputBatch.create(**dims, num_blocks=num_blocks, vocab_size=VOCAB_SIZE, seed=0)
        self.prompt_logprobs = PromptLogprobs(RunnerConfig(), vocab_size=VOCAB_SIZE)
        buckets = StepBuckets(
            **dims,
            feature_variants=[self.prompt_logprobs.variants()],
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
            max_decode_burst=self.max_decode_burst,
        )
        self.builder = BatchBuilder(
            buckets=buckets,
            input_batch=self.rows,
            max_num_seqs=max_num_seqs,
            features=[self.prompt_logprobs],
        )
        self.device = RowDevice(
            windows,
            block_sizes=block_sizes,
            max_num_seqs=max_num_seqs,
            slot_shapes=buckets.slot_shapes,
        )
        self.live, self.token_ids, self.in_flight = {}, {}, deque()
        self.num_requests = 0
        self.decisions = []

    def run(self):
        # In half of the runs so few requests arrive that most steps are bursts of the same ones.
        is_quiet = self.draw.random() < 0.5
        for _ in range(40):
            if not self.live or self.draw.random() < (0.1 if is_quiet else 0.5):
                for _ in range(self.draw.randint(1, 4)):
                    self.add()
            if self.draw.random() < 0.02:
                self.decisions.append(self.scheduler.reset_prefix_cache(True))
            for _ in range(self.draw.randint(1, 12 if is_quiet else 3)):
                self.step()
        for _ in range(10_000):
            if not self.live:
                return
            self.step()
        raise AssertionError(f"never end: {list(self.live)}")

    def add(self, req_id=None):
        draw = self.draw
        self.num_requests += 1
        prompt = [1, 2, 3, 4] * draw.choice([0, 1, 3])
        fork_from = draw.choice(sorted(self.live)) if self.live and draw.random() < 0.2 else None
        if fork_from is not None:
            known = self.scheduler.requests[fork_from].all_token_ids
            prompt = known[: draw.randint(1, len(known))]
        prompt = prompt + [draw.randrange(VOCAB_SIZE) for _ in range(draw.randint(1, 9))]
        wishes = draw.choice(
            [*[{}] * 8, {"logprobs": 2}, {"prompt_logprobs": 1}, {"presence_penalty": 0.5}]
        )
        max_tokens = draw.choice([1, 3, 10, 40])
        request = EngineRequest(
            request_id=req_id or f"r{self.num_requests}",
            prompt_token_ids=prompt[: self.max_model_len - 2],
            sampling_params=SamplingParams(
                max_tokens=max_tokens,
                min_tokens=draw.choice([0, 0, 0, min(4, max_tokens)]),
                ignore_eos=draw.random() < 0.6,
                stop_token_ids=draw.choice([None, [3]]),
                **wishes,
            ),
            eos_token_ids=(EOS,),
            arrival_time=float(self.num_requests),
            priority=draw.choice([0, 1, -self.num_requests]),
            keep_blocks=draw.random() < 0.15,
            fork_from=fork_from,
        )
        try:
            self.scheduler.add_request(request)
        except InvalidRequestError:
            return
        self.live[request.request_id] = request
        self.token_ids[request.request_id] = []

    def abort(self):
        req_id = self.draw.choice(sorted(self.live))
        del self.live[req_id]
        self.scheduler.finish_requests([req_id])
        if self.draw.random() < 0.5:
            self.add(req_id)

    def step(self):
        burst = self.draw.choice([1, self.max_decode_burst, self.max_decode_burst])
        output = self.scheduler.schedule(burst)
        self.scheduler.check_invariants()
        self.decisions.append(output)
        self.rows.update(output)
        self.prompt_logprobs.before_step(output, None)
        self.rows.pack_started_rows()
        for table_idx, table in enumerate(self.rows.block_tables.slot_tables):
            for packed_np in table.pack_new_slots():
                self.device.write_slots(table_idx, packed_np)
        self.device.copy_blocks(output.block_copies)
        if output.num_scheduled_tokens:
            built = self.builder.build(output)
            step = DeviceStep(built=built, rows=self.rows)
            step.result, step.feature_results = self.device.compute(built)
            self.rows.record_drawn(built.rows_np, built.num_drawn_np)
            self.in_flight.append((output, step))
        if self.live and self.draw.random() < 0.02:
            self.abort()
        is_idle = not output.num_scheduled_tokens
        while self.in_flight and (is_idle or len(self.in_flight) >= self.num_steps_in_flight):
            self.finish_oldest_step(*self.in_flight.popleft())

    def finish_oldest_step(self, output, step):
        for update in self.scheduler.update_from_output(output, step.sample_tokens()):
            req_id = update.request_id
            self.decisions.append(update)
            self.token_ids[req_id] += update.new_token_ids
            if update.finish_reason is not None:
                request = self.live.pop(req_id)
                got = (self.token_ids[req_id], update.finish_reason)
                assert got == tokens_alone(request, self.max_model_len)
        stats = self.scheduler.make_stats()
        # Residency contains times, which differ.
        self.decisions.append(msgspec.structs.replace(stats, kv_block_residency=BlockResidency()))


def disable_shortcuts(monkeypatch):
    set_tokens, record_drawn = Request.set_tokens_before_allocate, InputBatch.record_drawn

    def is_never_plain(self, num_tokens):
        set_tokens(self, num_tokens)
        self.num_plain_tokens = 0

    def is_written_at_once(self, rows_np, num_drawn_np):
        record_drawn(self, rows_np.copy(), num_drawn_np)

    def append_nothing(requests, runner_output, num_wanted):
        num_reqs = len(runner_output.req_ids)
        return [None] * num_reqs, list(range(num_reqs))

    monkeypatch.setattr(Request, "set_tokens_before_allocate", is_never_plain)
    monkeypatch.setattr(InputBatch, "record_drawn", is_written_at_once)
    monkeypatch.setattr(BurstRepeater, "repeat", lambda *_: None)
    monkeypatch.setattr(scheduler_module, "append_plain", append_nothing)


def check_shortcuts(seeds, monkeypatch):
    """Returns how many bursts repeated the previous one and how many were built anew."""
    num_bursts = Counter()
    repeat = BurstRepeater.repeat

    def count(*arguments):
        built = repeat(*arguments)
        num_bursts["anew" if built is None else "repeated"] += 1
        return built

    for seed in seeds:
        short, long = Traffic(seed), Traffic(seed)
        with monkeypatch.context() as patch:
            patch.setattr(BurstRepeater, "repeat", count)
            short.run()
        with monkeypatch.context() as patch:
            disable_shortcuts(patch)
            long.run()
        assert short.decisions == long.decisions
    return num_bursts


def test_shortcuts_of_steady_decode_do_not_change_results(monkeypatch):
    # Together, these seeds have KV cache groups of windows, of states, and of two block sizes.
    num_bursts = check_shortcuts((0, 3, 14), monkeypatch)
    assert min(num_bursts["repeated"], num_bursts["anew"]) > 50


@pytest.mark.slow  # a minute: pytest -m slow tests/slow_model/test_runner_rows.py
def test_shortcuts_of_steady_decode_do_not_change_results_for_long(monkeypatch):
    check_shortcuts(range(1000, 1300), monkeypatch)
