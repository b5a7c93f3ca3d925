"""Samples are seconds of one call; a program of many steps is divided by them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops import gpu_timing
from benchmarks.ops.gpu_units import Program, Unit

UNIT = Unit(kind="time", op="op", case="case", body="xla")


def counting_program() -> Program:
    """Adds the step's index, so that the sum tells which steps ran."""
    return Program(
        make=lambda seed: (jnp.zeros((4,)), jnp.ones((4,))),
        step=lambda step_idx, state, inputs: state + inputs * step_idx,
        verify=lambda state, inputs, last: [],
    )


@pytest.mark.parametrize("num_steps, wanted", [(1, 5.0), (3, 5 + 6 + 7.0)])
def test_a_program_does_its_steps_from_the_first_one_given(num_steps: int, wanted: float) -> None:
    program = counting_program()
    compiled = gpu_timing.compile_unit(UNIT, program, num_steps)
    state, inputs = program.make(0)
    assert compiled(jnp.int32(5), state, inputs).tolist() == [wanted] * 4
    assert state.is_deleted()  # donated: poison in it is where the result goes


class Clock:
    """Moves only when it is told to."""

    now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(gpu_timing, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    return clock


def test_time_is_that_of_one_call(clock: Clock) -> None:
    calls = []

    def slow(first_step_idx: jax.Array, state: jax.Array, inputs: jax.Array) -> jax.Array:
        calls.append(int(first_step_idx))
        clock.now_s += 0.02
        return state

    samples = gpu_timing.time_program(
        slow, jnp.zeros(1), jnp.zeros(1), num_steps=4, calls_per_step=2, budget_s=0.1
    )
    assert samples.seconds == pytest.approx([0.02 / 8] * 3)
    assert set(calls) == {0, 4}  # steps count on, so that rows take turns
    assert "4 steps of 2 calls" in samples.method


@pytest.mark.parametrize(
    ("call_s", "num_calls"), [(0.0005, 80), (0.03, 1), (3.0, 1), (1e-6, gpu_timing.MAX_CALLS)]
)
def test_short_runs_are_repeated_within_a_sample(
    clock: Clock, call_s: float, num_calls: int
) -> None:
    asked = []

    def run(num_calls: int) -> None:
        asked.append(num_calls)
        clock.now_s += num_calls * call_s

    samples = gpu_timing.take_samples(run, 0.0)
    # One for the first time, one to learn how long it takes; then so many, one of them unused.
    assert asked == [1, 1] + [num_calls] * (1 + 3)
    assert samples == pytest.approx([call_s] * 3, rel=1e-3)


def test_samples_are_taken_until_the_time_is_spent_or_there_are_enough(clock: Clock) -> None:
    def run(num_calls: int) -> None:
        clock.now_s += num_calls * 0.001

    # 0.042 s are spent before the first sample of 0.04 s.
    assert len(gpu_timing.take_samples(run, 0.25)) == 6
    assert len(gpu_timing.take_samples(run, 3600.0)) == gpu_timing.NUM_SAMPLES


def test_spread_is_the_outer_deciles() -> None:
    assert gpu_timing.spread([float(value) for value in range(11)]) == (1.0, 9.0)
    assert gpu_timing.spread([2.0]) == (2.0, 2.0)


def test_float32_products_are_full_ones_where_wanted() -> None:
    with gpu_timing.precision_of(Unit(**{**_fields(UNIT), "highest_precision": True})):
        assert "HIGHEST" in str(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))))
    with gpu_timing.precision_of(UNIT):
        assert "HIGHEST" not in str(jax.make_jaxpr(jnp.dot)(jnp.ones((2, 2)), jnp.ones((2, 2))))


def _fields(unit: Unit) -> dict:
    return {name: getattr(unit, name) for name in ("kind", "op", "case", "body")}
