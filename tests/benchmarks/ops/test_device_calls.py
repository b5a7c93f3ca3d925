"""Calls are timed one by one, and repeated calls stay calls."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops import device_calls
from benchmarks.ops.device_calls import Work, measure_calls, take_samples
from benchmarks.units.unit import Finding


class Clock:
    """Moves only when it is told to."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(device_calls, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


@pytest.mark.parametrize(
    ("call_s", "num_calls"), [(0.0005, 80), (0.03, 1), (3.0, 1), (1e-6, device_calls.MAX_CALLS)]
)
def test_short_calls_are_repeated_within_a_sample(clock, call_s: float, num_calls: int) -> None:
    asked = []

    def run(num_calls: int) -> None:
        asked.append(num_calls)
        clock.now_s += num_calls * call_s

    samples = take_samples(run, 0.0)
    # One call compiles, one shows how long it takes, one sample is not counted.
    assert asked == [1, 1] + [num_calls] * (1 + 3)
    assert samples == pytest.approx([call_s] * 3, rel=1e-3)


def test_samples_end_with_the_budget_or_when_there_are_enough(clock) -> None:
    def run(num_calls: int) -> None:
        clock.now_s += num_calls * 0.001

    # 0.042 s are spent before the first sample of 0.04 s.
    assert len(take_samples(run, 0.25)) == 6
    assert len(take_samples(run, 3600.0)) == device_calls.NUM_SAMPLES


def test_calls_per_program_hide_the_launch_of_short_calls_only() -> None:
    assert Work(num_bytes=2**31).calls_per_program == 1
    assert Work(num_bytes=2**26).calls_per_program == 12  # 17 microseconds each
    assert Work(num_bytes=2**26, num_flops=10**12).calls_per_program == 1


def test_outputs_take_the_place_of_updated_arrays() -> None:
    (total,) = device_calls._repeat(lambda x, y: (x + y,), 5, 1, (jnp.zeros(3),), (jnp.ones(3),))
    assert total.tolist() == [5.0] * 3


def test_equal_calls_are_all_made() -> None:
    calls = []

    def count(x: jax.Array, index: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sin(x) + index

    program = jax.jit(lambda out, arrays: device_calls._repeat(count, 5, 0, out, arrays))
    arrays = (jnp.ones(3), jnp.int32(2))
    out = program(jnp.zeros(3), arrays)
    jax.effects_barrier()
    assert len(calls) == 5 and out.tolist() == (jnp.sin(arrays[0]) + 2).tolist()
    # The sine is computed within the loop, not once before it.
    plain = jax.jit(
        lambda out, arrays: device_calls._repeat(lambda x, i: jnp.sin(x) + i, 5, 0, out, arrays)
    )
    text = plain.lower(jnp.zeros(3), (jnp.ones(()), jnp.arange(3.0))).compile().as_text()
    entry = text[text.index("ENTRY ") :]
    assert "sine" in text and "sine" not in entry


def test_wrong_output_has_no_time() -> None:
    def measure(error: float):
        finding = Finding(what="out", error=error, limit=0.5)
        work = Work(num_bytes=2**31)
        return measure_calls(lambda x: x + 1, (jnp.ones(2),), lambda out: [finding], work=work)

    assert measure(1.0).figures == {}
    assert min(measure(0.0).figures["call_ms"]) > 0
