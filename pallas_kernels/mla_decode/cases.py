"""Named example inputs of `mla_decode`, for tests and benchmarks.

All memory that a sequence does not own is NaN, and table entries that nothing may follow hold
garbage, so a body that reads where it must not shows it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class MLADecodeCase:
    """Sizes of one example. `requests` holds (query tokens: 0 or 1, seq_len) of each request."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_padding_tokens: int = 2
    max_blocks_per_req: int | None = None  # None: as many as the longest request needs, plus one
    num_rows: int = 2
    row: int = 1
    num_q_heads: int = 8
    latent_dim: int = 32
    rope_dim: int = 16
    block_size: int = 16
    dtype: str = "float32"
    scale: float = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class MLADecodeInputs:
    """Arguments of `mla_decode`, and the same latents not paged."""

    q: jax.Array  # f[num_tokens, num_q_heads, latent_dim + rope_dim]
    kv_cache: jax.Array  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: int
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    rules: dict[str, int | float]  # the keyword arguments of a body
    latents_np: tuple[np.ndarray, ...]  # f32[seq_len, latent_dim + rope_dim] of each request

    @property
    def arrays(self) -> tuple[jax.Array | int, ...]:
        """The positional arguments, in order."""
        return (
            *(self.q, self.kv_cache, self.row),
            *(self.block_tables, self.seq_lens, self.query_start_loc),
        )


def _decodes(*seq_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, seq_len) for seq_len in seq_lens)


CASES: tuple[MLADecodeCase, ...] = (
    MLADecodeCase(name="ragged", requests=_decodes(5, 16, 33, 1, 64, 200)),
    MLADecodeCase(
        name="empty_and_idle_requests",
        requests=((0, 0), (1, 9), (0, 40), (1, 65), (0, 0), (1, 0)),
        num_padding_tokens=3,
    ),
    MLADecodeCase(
        name="padding_only", requests=((0, 0),) * 3, num_padding_tokens=8, max_blocks_per_req=2
    ),
    MLADecodeCase(name="one_request", requests=_decodes(300), num_padding_tokens=0),
    MLADecodeCase(name="many_chunks", requests=_decodes(1500, 3, 700), block_size=64),
    MLADecodeCase(name="block_8", requests=_decodes(7, 8, 9, 130), block_size=8, num_q_heads=3),
    MLADecodeCase(name="block_256", requests=_decodes(255, 257), block_size=256),
    MLADecodeCase(
        name="deepseek_heads_16",
        requests=_decodes(70, 129),
        num_q_heads=16,
        latent_dim=512,
        rope_dim=64,
        dtype="bfloat16",
        scale=192**-0.5,
    ),
    MLADecodeCase(
        name="deepseek_heads_128_float16",
        requests=_decodes(1, 100),
        num_q_heads=128,
        latent_dim=512,
        rope_dim=64,
        block_size=64,
        dtype="float16",
        scale=192**-0.5,
    ),
)


def build_inputs(case: MLADecodeCase, seed: int = 0) -> MLADecodeInputs:
    """Draws sequences, lays them into scattered blocks, and poisons everything else."""
    rng = np.random.default_rng(seed)
    num_query_np = np.array([num_query for num_query, _ in case.requests])
    seq_lens_np = np.array([seq_len for _, seq_len in case.requests])
    num_needed_np = -(-seq_lens_np // case.block_size)
    max_blocks_per_req = case.max_blocks_per_req or int(num_needed_np.max()) + 1
    num_blocks = int(num_needed_np.sum()) + 3
    cache_dim = case.latent_dim + case.rope_dim

    cache_shape = (case.num_rows, num_blocks, 1, case.block_size, cache_dim)
    kv_cache_np = np.full(cache_shape, np.nan, np.float32)
    garbage_ids = np.array([0, num_blocks - 1, -7, num_blocks + 1000])
    block_tables_np = rng.choice(garbage_ids, (len(case.requests), max_blocks_per_req))
    free_blocks = list(1 + rng.permutation(num_blocks - 1))
    latents_np = tuple(_draw(rng, case.dtype, seq_len, cache_dim) for seq_len in seq_lens_np)
    for req_idx, latents in enumerate(latents_np):
        for position, latent in enumerate(latents):
            logical_block, offset = divmod(position, case.block_size)
            if offset == 0:
                block_tables_np[req_idx, logical_block] = free_blocks.pop()
            block_id = block_tables_np[req_idx, logical_block]
            kv_cache_np[case.row, block_id, 0, offset] = latent

    num_tokens = int(num_query_np.sum()) + case.num_padding_tokens
    q_np = _draw(rng, case.dtype, num_tokens, case.num_q_heads, cache_dim)
    return MLADecodeInputs(
        q=jnp.asarray(q_np, case.dtype),
        kv_cache=jnp.asarray(kv_cache_np, case.dtype),
        row=case.row,
        block_tables=jnp.asarray(block_tables_np, jnp.int32),
        seq_lens=jnp.asarray(seq_lens_np, jnp.int32),
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), jnp.int32),
        rules={"latent_dim": case.latent_dim, "scale": case.scale},
        latents_np=latents_np,
    )


def _draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draws normal numbers that `dtype` holds exactly, as float32."""
    return rng.standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float32)
