"""Attention on a CPU: batches, paged caches, paxkv's body, and its check against float64."""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.ops.float64 import SeenRule, attend
from pallas_kernels import paged_attention

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 64
SCALE = HEAD_DIM**-0.5
# Blocks in the pool per block that a sequence owns, because a pool is seldom full.
POOL_PER_OWNED_BLOCK = 1.25
MAX_RELATIVE_ERROR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuBatch:
    """One shape of batch. `requests` holds (query tokens, seq_len) of each request."""

    name: str
    requests: tuple[tuple[int, int], ...]

    @property
    def num_tokens(self) -> int:
        return sum(num_query for num_query, _ in self.requests)

    @property
    def max_query_len(self) -> int:
        return max(num_query for num_query, _ in self.requests)

    @property
    def kv_bytes(self) -> int:
        """Bytes of all keys and values of the batch."""
        num_keys = sum(seq_len for _, seq_len in self.requests)
        return num_keys * 2 * NUM_KV_HEADS * HEAD_DIM * 4


def batches() -> tuple[CpuBatch, ...]:
    """64 decodes at several contexts, and a chunk of a prompt together with 32 decodes."""
    ragged = np.random.default_rng(0).permutation(np.linspace(32, 512, 64).astype(int))
    return (
        *(
            CpuBatch(name=f"64 decodes at {context}", requests=((1, context),) * 64)
            for context in (64, 128, 256, 512)
        ),
        CpuBatch(
            name="64 decodes at 32 to 512",
            requests=tuple((1, int(context)) for context in ragged),
        ),
        CpuBatch(
            name="chunk of 512 at 1,024 beside 32 decodes at 256",
            requests=((512, 1024), *((1, 256),) * 32),
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedData:
    """Arguments of `paged_attention`; the rows of the cache hold different data."""

    batch: CpuBatch
    q: jax.Array  # f32[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array  # f32[num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]


def build_paged_data(batch: CpuBatch, *, block_size: int, num_rows: int) -> PagedData:
    """Writes the batch's sequences into blocks at random places of a pool."""
    rng = np.random.default_rng(0)
    num_query_np, seq_lens_np = np.array(batch.requests).T
    num_owned_np = -(-seq_lens_np // block_size)
    num_owned = int(num_owned_np.sum())
    num_blocks = int(num_owned * POOL_PER_OWNED_BLOCK) + 1
    ids_np = rng.permutation(num_blocks)[:num_owned]
    block_tables_np = np.zeros((len(num_owned_np), int(num_owned_np.max())), np.int32)
    ends = np.cumsum(num_owned_np)
    for req_idx, (end, owned) in enumerate(zip(ends, num_owned_np, strict=True)):
        block_tables_np[req_idx, :owned] = ids_np[end - owned : end]
    shape = (num_rows, 2 * num_blocks, NUM_KV_HEADS, block_size, HEAD_DIM)
    q_shape = (batch.num_tokens, NUM_Q_HEADS, HEAD_DIM)
    query_start_loc_np = np.concatenate([[0], np.cumsum(num_query_np)])
    return PagedData(
        batch=batch,
        q=jnp.asarray(rng.standard_normal(q_shape, np.float32)),
        kv_cache=jnp.asarray(rng.standard_normal(shape, np.float32)),
        block_tables=jnp.asarray(block_tables_np),
        seq_lens=jnp.asarray(seq_lens_np, jnp.int32),
        query_start_loc=jnp.asarray(query_start_loc_np, jnp.int32),
    )


def paged_call(data: PagedData) -> Callable[[int], jax.Array]:
    """Returns a function that runs paxkv's body on one row of the cache."""

    @jax.jit
    def plain(row: jax.Array, *arrays: jax.Array) -> jax.Array:
        q, kv_cache, *sequences = arrays
        return paged_attention(
            *(q, kv_cache, row, *sequences),
            scale=SCALE,
            max_query_len=data.batch.max_query_len,
            implementation="xla",
        )

    arrays = (data.q, data.kv_cache, data.block_tables, data.seq_lens, data.query_start_loc)
    rows = [jnp.int32(row) for row in range(data.kv_cache.shape[0])]
    return lambda row: plain(rows[row], *arrays).block_until_ready()


def gathered(data: PagedData, row: int, req_idx: int) -> tuple[np.ndarray, np.ndarray]:
    """One request's keys and values, f32[seq_len, num_kv_heads, head_dim] each."""
    seq_len = data.batch.requests[req_idx][1]
    block_size = data.kv_cache.shape[3]
    ids_np = np.asarray(data.block_tables)[req_idx, : -(-seq_len // block_size)]

    def one(entries_np: np.ndarray) -> np.ndarray:
        halves_np = np.asarray(data.kv_cache)[row, entries_np].transpose(0, 2, 1, 3)
        return halves_np.reshape(-1, *halves_np.shape[2:])[:seq_len]

    return one(2 * ids_np), one(2 * ids_np + 1)


def relative_error(data: PagedData, out: jax.Array, row: int) -> float:
    """Norm of the difference from float64, divided by the norm of the float64 result."""
    q_np, out_np = np.asarray(data.q), np.asarray(out).astype(np.float64)
    starts_np = np.asarray(data.query_start_loc)
    expected_np = np.zeros_like(out_np)
    for req_idx, (num_query, seq_len) in enumerate(data.batch.requests):
        tokens = slice(int(starts_np[req_idx]), int(starts_np[req_idx + 1]))
        positions_np = np.arange(seq_len - num_query, seq_len)
        keys_np, values_np = gathered(data, row, req_idx)
        expected_np[tokens], _ = attend(
            *(q_np[tokens], keys_np, values_np, positions_np), SeenRule(scale=SCALE)
        )
    return float(np.linalg.norm(out_np - expected_np) / np.linalg.norm(expected_np))
