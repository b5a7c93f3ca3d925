"""How a program is compiled for the benchmark, and how its time on the device is taken."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.ops.gpu_units import Program, Unit

# A sample is a queue of calls at least this long: the cost of starting the first and of waiting
# for the last, about 0.1 ms, stays in it and under 0.3 %.
SAMPLE_S = 0.04
MAX_CALLS = 200
NUM_SAMPLES = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Seconds of one call of the op, once a sample, and how they were taken."""

    seconds: tuple[float, ...]
    method: str

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def spread(values: list[float] | tuple[float, ...]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    if len(values) == 1:
        return values[0], values[0]
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return deciles[0], deciles[-1]


def jit_unit(unit: Unit, program: Program, num_steps: int) -> Callable[..., Any]:
    """`(first_step_idx, state, inputs) -> state` after `num_steps` steps; the state is donated.

    A donated state that no step reads is still the buffer that is written: poison in it shows
    through wherever a body leaves something out.
    """

    def run(first_step_idx: jax.Array, state: Any, inputs: Any) -> Any:
        if num_steps == 1:
            return program.step(first_step_idx, state, inputs)
        return lax.fori_loop(
            0, num_steps, lambda i, state: program.step(first_step_idx + i, state, inputs), state
        )

    run.__name__ = f"{unit.kind}_{unit.op}_{unit.body}"
    return jax.jit(run, donate_argnums=1, keep_unused=True)


@contextlib.contextmanager
def precision_of(unit: Unit) -> Iterator[None]:
    """Full float32 products, where the unit wants them."""
    precision = "highest" if unit.highest_precision else None
    with jax.default_matmul_precision(precision):
        yield


def compile_unit(
    unit: Unit, program: Program, num_steps: int, sharding: jax.sharding.Sharding | None = None
) -> jax.stages.Compiled:
    """Compiles a unit's program from shapes alone.

    Args:
        sharding: Where it is to run, if that is not the default device.
    """

    def shaped(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    state, inputs = jax.tree.map(shaped, jax.eval_shape(lambda: program.make(0)))
    first_step_idx = shaped(jax.ShapeDtypeStruct((), jnp.int32))
    with precision_of(unit):
        return jit_unit(unit, program, num_steps).lower(first_step_idx, state, inputs).compile()


def take_samples(run: Callable[[int], None], budget_s: float) -> list[float]:
    """Seconds of one `run`, once a sample.

    Args:
        run: `run(n)` queues n calls and waits for all of them.
        budget_s: Ends after a sample, once so much time is spent; at least 3 samples are taken.
    """
    started = time.perf_counter()
    run(1)
    once_s = _elapsed(lambda: run(1))
    num_calls = max(1, min(MAX_CALLS, round(SAMPLE_S / max(once_s, 1e-6))))
    run(num_calls)  # clocks and caches settle
    samples: list[float] = []
    while len(samples) < NUM_SAMPLES:
        if len(samples) >= 3 and time.perf_counter() - started > budget_s:
            break
        samples.append(_elapsed(lambda: run(num_calls)) / num_calls)
    return samples


def time_program(
    compiled: Callable[..., Any],
    state: Any,
    inputs: Any,
    *,
    num_steps: int,
    calls_per_step: int,
    budget_s: float,
) -> Samples:
    """Times a compiled unit. The state is used up."""
    # Steps count on from call to call, so that a step that chooses a row by its index rotates.
    starts = [jnp.asarray(index, jnp.int32) for index in (0, num_steps)]
    holder = [jax.block_until_ready(state)]
    jax.block_until_ready(inputs)

    def run(num_calls: int) -> None:
        for call in range(num_calls):
            holder[0] = compiled(starts[call % 2], holder[0], inputs)
        jax.block_until_ready(holder[0])

    per_call = num_steps * calls_per_step
    seconds = [sample / per_call for sample in take_samples(run, budget_s)]
    method = "calls queued one after another, one wait at the end"
    if per_call > 1:
        method = f"{num_steps} steps of {calls_per_step} calls in one program; {method}"
    return Samples(seconds=tuple(seconds), method=method)


def _elapsed(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
