"""Times writes of one step's keys and values on the CPU, for caches of several sizes."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.cpu_attention import HEAD_DIM, NUM_KV_HEADS
from pallas_kernels import kv_scatter

NUM_TOKENS = 64
NUM_ROWS = 8
BLOCK_SIZE = 64


@dataclass(slots=True)
class ScatterCache:
    """A cache that `scatter_call` donates and rebinds; no other object may hold it."""

    kv_cache: jax.Array  # f32[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]


def build_cache(num_bytes: int) -> ScatterCache:
    """A cache of about `num_bytes`."""
    bytes_per_block = 2 * NUM_ROWS * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 4
    shape = (NUM_ROWS, 2 * (num_bytes // bytes_per_block), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return ScatterCache(jnp.zeros(shape, jnp.float32))


def scatter_call(cache: ScatterCache) -> Callable[[int], None]:
    """Returns a function that writes 64 tokens to random slots of row `data_idx`, in place."""
    slots = jnp.asarray(_slots(cache.kv_cache.shape[1] // 2), jnp.int32)
    k, v = map(jnp.asarray, _keys_and_values())
    rows = [jnp.int32(row) for row in range(NUM_ROWS)]
    write = jax.jit(kv_scatter, static_argnames="implementation", donate_argnums=0)

    def run(data_idx: int) -> None:
        arguments = (cache.kv_cache, k, v, slots, rows[data_idx])
        cache.kv_cache = write(*arguments, implementation="xla")
        cache.kv_cache.block_until_ready()

    return run


def holds_what_was_written(cache: ScatterCache) -> bool:
    """True if every row holds the tokens that a call writes, and nothing else."""
    blocks_np, offsets_np = np.divmod(_slots(cache.kv_cache.shape[1] // 2), BLOCK_SIZE)
    wanted = _keys_and_values()
    num_wanted = NUM_ROWS * sum(map(np.count_nonzero, wanted))
    if int(jnp.count_nonzero(cache.kv_cache)) != num_wanted:
        return False
    for row in range(NUM_ROWS):
        for part, wanted_np in enumerate(wanted):
            got = cache.kv_cache[row, 2 * blocks_np + part, :, offsets_np]
            if not np.array_equal(np.asarray(got), wanted_np):
                return False
    return True


def _keys_and_values() -> np.ndarray:  # f32[2, num_tokens, num_kv_heads, head_dim]
    shape = (2, NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def _slots(num_blocks: int) -> np.ndarray:
    """Different slots, i64[num_tokens]."""
    num_slots = num_blocks * BLOCK_SIZE
    return np.random.default_rng(num_blocks).choice(num_slots, NUM_TOKENS, replace=False)
