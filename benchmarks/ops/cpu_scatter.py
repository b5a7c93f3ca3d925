"""Writes of one step's keys and values on the CPU, for caches of several sizes."""

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
class ScatterCaches:
    """Two caches that `scatter_call` donates and rebinds; no other object may hold them."""

    k_cache: jax.Array  # f32[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array


def build_caches(num_bytes: int) -> ScatterCaches:
    """Two caches of about `num_bytes` together."""
    bytes_per_block = 2 * NUM_ROWS * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 4
    shape = (NUM_ROWS, num_bytes // bytes_per_block, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    return ScatterCaches(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))


def scatter_call(caches: ScatterCaches, seed: int = 0) -> Callable[[int], None]:
    """Writes 64 tokens to random slots of row `data_idx`, in place."""
    rng = np.random.default_rng(seed)
    num_blocks = caches.k_cache.shape[1]
    slots = jnp.asarray(_slots(num_blocks), jnp.int32)
    shape = (NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    k, v = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))
    rows = [jnp.int32(row) for row in range(NUM_ROWS)]
    write = jax.jit(kv_scatter, static_argnames="implementation", donate_argnums=(0, 1))

    def run(data_idx: int) -> None:
        caches.k_cache, caches.v_cache = write(
            *(caches.k_cache, caches.v_cache, k, v, slots, rows[data_idx]), implementation="xla"
        )
        caches.v_cache.block_until_ready()

    return run


def holds_what_was_written(caches: ScatterCaches, seed: int = 0) -> bool:
    """True if every row holds the tokens that a call of this seed writes, and nothing else."""
    rng = np.random.default_rng(seed)
    blocks_np, offsets_np = np.divmod(_slots(caches.k_cache.shape[1]), BLOCK_SIZE)
    shape = (NUM_TOKENS, NUM_KV_HEADS, HEAD_DIM)
    for cache in (caches.k_cache, caches.v_cache):
        wanted_np = rng.standard_normal(shape, np.float32)
        num_written = int(jnp.count_nonzero(cache))
        if num_written != NUM_ROWS * np.count_nonzero(wanted_np):
            return False
        for row in range(NUM_ROWS):
            got_np = np.asarray(cache[row, blocks_np, :, offsets_np])
            if not np.array_equal(got_np, wanted_np):
                return False
    return True


def _slots(num_blocks: int) -> np.ndarray:
    """Different slots, i64[num_tokens]."""
    num_slots = num_blocks * BLOCK_SIZE
    return np.random.default_rng(num_blocks).choice(num_slots, NUM_TOKENS, replace=False)
