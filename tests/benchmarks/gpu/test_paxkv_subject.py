"""paxkv in small, on the CPU: every measurement, and the same tokens with and without engine."""

import itertools

import pytest

from benchmarks.gpu import paxkv_subject
from benchmarks.gpu.paxkv_engine import PaxkvEngine
from benchmarks.gpu.paxkv_steps import StepLoop
from benchmarks.gpu.paxkv_subject import PaxkvSubject
from benchmarks.gpu.plain_schedule import PlainSchedule, StepLimits
from benchmarks.gpu.sizes import REHEARSAL, throughput_workload
from benchmarks.gpu.units import PAXKV, all_units
from benchmarks.ops.gpu_units import AbsentError
from paxkv.config.engine_config import SchedulerConfig


@pytest.fixture(scope="module")
def subject() -> PaxkvSubject:
    """One for all tests: its programs are compiled once."""
    return PaxkvSubject(model="llama-3.1-8b", kernels="auto", is_rehearsal=True)


def measured(subject: PaxkvSubject) -> dict[str, dict]:
    """What every unit of paxkv's gives, by case."""
    fields = {}
    for unit in all_units(is_rehearsal=True):
        if (unit.op, unit.body) == ("llama-3.1-8b", PAXKV):
            seed = {} if unit.measure == "load" else {"seed": 0}
            fields[unit.case] = getattr(subject, unit.measure)(**unit.options, **seed)
    return fields


def test_every_measurement_gives_figures(subject):
    fields = measured(subject)
    for case, of_case in fields.items():
        for metric, values in of_case["figures"].items():
            assert values, (case, metric)
            # A device is idle for less than no time only by noise; no other figure is below 0.
            assert "idle" in metric or min(values) >= 0, (case, metric)
    assert fields["load"]["notes"] == []
    # A step of 16 tokens, its sampler, and a burst of 4 requests, the last one of two and more.
    assert fields["compile for throughput"]["figures"]["num_programs"] == [3.0]
    # A layer of 2 * 64 * (64 + 32) + 3 * 64 * 96 + 2 * 64 weights, the head's 256 * 64, 64; f32.
    reads = fields["decode, 4 requests"]["reads"]
    assert reads["weight_bytes"] == 4 * (12_288 + 18_432 + 128 + 16_384 + 64)
    # Keys and values of 2 heads of 16, f32.
    assert reads["kv_bytes"] == 4 * reads["context_tokens"] * 2 * 2 * 16 * 4
    # From behind the warm-up's 2 bursts of 2 to the end, half a token on: 20 + (4 + 30) / 2 + 0.5.
    assert reads["context_tokens"] == 37.5


def test_tokens_are_those_of_the_engine(subject):
    sizes, vocab_size = REHEARSAL, 256
    workload = throughput_workload(sizes, vocab_size=vocab_size, seed=5)
    bounds = StepLimits(block_size=16, num_blocks=33, max_num_seqs=4, max_num_batched_tokens=16)
    schedule = PlainSchedule(workload, bounds, name="tokens")
    loop = StepLoop(subject._runner, schedule)
    for max_decode_steps in itertools.cycle((1, 2)):
        if not loop.start(max_decode_steps):
            break
        if loop.num_in_flight > 1:
            loop.fetch()
    loop.end()
    engine = PaxkvEngine(
        subject._runner,
        sizes,
        vocab_size=vocab_size,
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=16, max_decode_burst=2
        ),
        max_model_len=sizes.max_model_len,
    )
    run = engine.run(workload, enable_prefix_caching=True)
    names = [f"tokens.{idx}" for idx in range(len(workload.requests))]
    assert [loop.token_ids[name] for name in names] == run.token_ids


def test_without_its_packages_the_engine_is_absent_and_says_which(subject, monkeypatch):
    monkeypatch.setattr(paxkv_subject, "missing_packages", lambda names: ["msgspec", "pyzmq"])
    with pytest.raises(AbsentError, match="needs msgspec, pyzmq"):
        subject.engine_throughput(seed=0)
    assert subject.throughput(seed=0)["figures"]["tokens_per_s"]
