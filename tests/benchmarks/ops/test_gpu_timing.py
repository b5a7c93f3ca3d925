"""Samples are seconds of one call; a program of many steps is divided by them."""

import time

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


def test_time_is_that_of_one_call() -> None:
    calls = []

    def slow(first_step_idx: jax.Array, state: jax.Array, inputs: jax.Array) -> jax.Array:
        calls.append(int(first_step_idx))
        time.sleep(0.02)
        return state

    samples = gpu_timing.time_program(
        slow, jnp.zeros(1), jnp.zeros(1), num_steps=4, calls_per_step=2, budget_s=0.1
    )
    assert 0.02 / 8 <= samples.median < 0.05 / 8
    assert set(calls) == {0, 4}  # steps count on, so that rows take turns
    assert "4 steps of 2 calls" in samples.method


def test_short_runs_are_repeated_within_a_sample() -> None:
    asked = []
    gpu_timing.take_samples(lambda num_calls: (asked.append(num_calls), time.sleep(0.0005)), 0.05)
    assert max(asked) > 10
    assert len(asked) >= 3 + 3


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
