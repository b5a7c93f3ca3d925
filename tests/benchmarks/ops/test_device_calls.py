"""The time of one call is right, and repeated calls are not optimized away."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from benchmarks.ops import device_calls
from benchmarks.ops.device_calls import Work, sample_seconds
from tests import on_device


@pytest.mark.parametrize(
    ("call_s", "num_calls"), [(0.0005, 80), (0.03, 1), (3.0, 1), (1e-6, device_calls.MAX_CALLS)]
)
def test_short_calls_are_repeated_within_a_sample(monkeypatch, call_s, num_calls) -> None:
    clock = SimpleNamespace(now_s=100.0, perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(device_calls, "time", clock)
    asked = []

    def run(num_calls: int) -> None:
        asked.append(num_calls)
        clock.now_s += num_calls * call_s

    samples = sample_seconds(run, 0.0)
    # One call compiles, one shows how long it takes, one sample is not counted.
    assert asked == [1, 1] + [num_calls] * (1 + 3)
    assert samples == pytest.approx([call_s] * 3, rel=1e-3)
    assert len(sample_seconds(run, 1e9)) == device_calls.NUM_SAMPLES


def test_calls_per_program_hide_the_launch_of_short_calls_only() -> None:
    assert Work(num_bytes=2**31).calls_per_program == 1
    assert Work(num_bytes=2**26).calls_per_program == 12  # 17 microseconds each
    assert Work(num_bytes=2**26, num_flops=10**12).calls_per_program == 1


def test_equal_calls_are_all_made() -> None:
    calls = []

    def count(x: jax.Array, index: jax.Array) -> jax.Array:
        jax.debug.callback(lambda: calls.append(1))
        return jnp.sin(x) + index

    program = jax.jit(lambda out, arrays: device_calls._repeat(count, 5, False, out, arrays))
    arrays = (on_device.ones(3), jnp.int32(2))
    out = program(on_device.zeros(3), arrays)
    jax.effects_barrier()
    assert len(calls) == 5 and out.tolist() == (jnp.sin(arrays[0]) + 2).tolist()
    # An updated array is replaced by the output.
    total = device_calls._repeat(
        lambda x, y: x + y, 5, True, on_device.zeros(3), (on_device.ones(3),)
    )
    assert total.tolist() == [5.0] * 3
