"""The device's copy bandwidth and matrix rate, measured in the same run as the ops."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.ops.device_calls import draw_normal, take_samples
from benchmarks.units.unit import Measured, Unit

_NUM_MATMULS = 4


def machine_units(*, is_rehearsal: bool) -> list[Unit]:
    num_bytes = 2**24 if is_rehearsal else 2**32
    matrix_dim = 256 if is_rehearsal else 8192
    measures: dict[str, Callable[[int], Measured]] = {
        "copy": functools.partial(_measure_copy, num_bytes),
        "add_one": functools.partial(_measure_add_one, num_bytes),
        "matmul": functools.partial(_measure_matmul, matrix_dim),
    }
    return [
        Unit(kind="machine", op="device", case=name, body="jax", measure=measure)
        for name, measure in measures.items()
    ]


def _measure_copy(num_bytes: int, seed: int) -> Measured:
    """A copy from device memory to device memory."""
    x = _random_words(num_bytes, seed)
    copy = jax.jit(lambda x, old: jnp.copy(x), donate_argnums=1, keep_unused=True)
    samples = _chained(lambda old: copy(x, old), jnp.zeros_like(x))
    return Measured(figures={"copy_gb_per_s": [2 * num_bytes / s / 1e9 for s in samples]})


def _measure_add_one(num_bytes: int, seed: int) -> Measured:
    """A kernel that reads everything and writes everything."""
    samples = _chained(jax.jit(lambda x: x + 1, donate_argnums=0), _random_words(num_bytes, seed))
    return Measured(figures={"copy_gb_per_s": [2 * num_bytes / s / 1e9 for s in samples]})


def _measure_matmul(matrix_dim: int, seed: int) -> Measured:
    """Products of random bfloat16 matrices; each takes the result of the one before."""
    x = draw_normal(seed, (matrix_dim, matrix_dim), "bfloat16")
    # The scale keeps the products at one size.
    w = draw_normal(seed + 1, (matrix_dim, matrix_dim), "bfloat16") * matrix_dim**-0.5

    @jax.jit
    def multiply(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _NUM_MATMULS, lambda _, x: x @ w, x)

    samples = _chained(lambda x: multiply(x, w), x)
    num_flops = _NUM_MATMULS * 2 * matrix_dim**3
    return Measured(figures={"matmul_tflop_per_s": [num_flops / s / 1e12 for s in samples]})


def _random_words(num_bytes: int, seed: int) -> jax.Array:
    shape = (num_bytes // 4,)
    draw = jax.jit(lambda: jax.random.bits(jax.random.key(seed), shape, jnp.uint32).astype("int32"))
    return draw()


def _chained(step: Callable[[jax.Array], jax.Array], state: jax.Array) -> list[float]:
    """Seconds of one call, of calls queued one after another."""
    holder = [state]

    def run(num_calls: int) -> None:
        for _ in range(num_calls):
            holder[0] = step(holder[0])
        jax.block_until_ready(holder[0])

    return take_samples(run)
