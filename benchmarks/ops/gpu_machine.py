"""What the device can do at all, measured in the same run: copy bandwidth and matrix rate."""

import statistics
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.ops.gpu_draws import draw_normal
from benchmarks.ops.gpu_timing import take_samples
from benchmarks.ops.gpu_units import Unit

_NUM_MATMULS = 4


def units(*, is_rehearsal: bool) -> list[Unit]:
    num_copied_bytes = 2**24 if is_rehearsal else 2**32
    matrix_dim = 256 if is_rehearsal else 8192
    here = "benchmarks.ops.gpu_machine"
    return [
        Unit(
            kind="machine",
            op="copy",
            case=f"{num_copied_bytes >> 20:,} MiB",
            body=body,
            measure=f"{here}:measure_{body}",
            options={"num_copied_bytes": num_copied_bytes},
            num_bytes=num_bytes,
        )
        for body, num_bytes in (
            ("copy", 2 * num_copied_bytes),
            ("add_one", 2 * num_copied_bytes),
            ("read", num_copied_bytes),
        )
    ] + [
        Unit(
            kind="machine",
            op="matmul",
            case=f"bfloat16 {matrix_dim}",
            body="matmul",
            measure=f"{here}:measure_matmul",
            options={"matrix_dim": matrix_dim},
            num_flops=2 * matrix_dim**3,
        )
    ]


def measure_copy(*, num_copied_bytes: int, seed: int, budget_s: float) -> dict[str, Any]:
    """A copy from device memory to device memory."""
    x = _random_words(num_copied_bytes, seed)
    copy = jax.jit(lambda x, old: jnp.copy(x), donate_argnums=1, keep_unused=True)
    return _measure_chain(lambda old: copy(x, old), jnp.zeros_like(x), budget_s)


def measure_add_one(*, num_copied_bytes: int, seed: int, budget_s: float) -> dict[str, Any]:
    """A kernel that reads everything and writes everything."""
    x = _random_words(num_copied_bytes, seed)
    return _measure_chain(jax.jit(lambda x: x + 1, donate_argnums=0), x, budget_s)


def measure_read(*, num_copied_bytes: int, seed: int, budget_s: float) -> dict[str, Any]:
    """A kernel that reads everything: a sum."""
    x = _random_words(num_copied_bytes, seed)
    add_up = jax.jit(lambda x, total: total + jnp.sum(x, dtype=jnp.int32))
    return _measure_chain(lambda total: add_up(x, total), jnp.zeros((), jnp.int32), budget_s)


def measure_matmul(*, matrix_dim: int, seed: int, budget_s: float) -> dict[str, Any]:
    """Products of random bfloat16 matrices; each takes the result of the one before."""
    shape = (matrix_dim, matrix_dim)
    x = draw_normal(seed, shape, "bfloat16")
    # Products with it keep numbers of about one size.
    w = draw_normal(seed + 1, shape, "bfloat16") * matrix_dim**-0.5

    @jax.jit
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _NUM_MATMULS, lambda _, x: x @ w, x)

    return _measure_chain(lambda x: multiply(x, w), x, budget_s, _NUM_MATMULS)


def _random_words(num_bytes: int, seed: int) -> jax.Array:
    bits = jax.jit(
        lambda: jax.random.bits(jax.random.key(seed), (num_bytes // 4,), jnp.uint32).astype("int32")
    )
    return bits()


def _measure_chain(step: Any, state: jax.Array, budget_s: float, num_each: int = 1) -> dict:
    holder = [state]

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])

    samples = [seconds / num_each for seconds in take_samples(run, budget_s)]
    return {
        "samples_s": samples,
        "median_s": statistics.median(samples),
        "method": "calls queued one after another, one wait at the end",
    }
