"""Named example inputs of `latent_attention`, for tests and benchmarks.

All memory that no sequence owns is NaN, and block table entries that must not be used hold garbage,
so a body that reads them gives wrong results.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionCase:
    """Sizes of one example. `requests` holds (query tokens, seq_len) of each request."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_padding_tokens: int = 2
    max_blocks_per_req: int | None = None  # None: as many as the longest request needs, plus one
    num_rows: int = 2
    row: int = 1
    num_q_heads: int = 8
    latent_dim: int = 32
    rope_dim: int = 16
    num_unused_columns: int = 0  # of the cached vectors, after the rotary part
    block_size: int = 16
    dtype: str = "float32"
    is_uint16: bool = False  # the cache holds the bits of `dtype`
    scale: float = 0.2

    @property
    def max_query_len(self) -> int | None:
        """The promise that the call makes: 1 if no request has more query tokens."""
        return 1 if all(num_query <= 1 for num_query, _ in self.requests) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionInputs:
    """Arguments of `latent_attention`, and the same vectors not paged."""

    q_latent: jax.Array  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array  # [num_rows, num_blocks, 1, block_size, width]
    row: int
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    rules: dict[str, object]  # the keyword arguments of a body
    cached_np: tuple[np.ndarray, ...]  # f32[seq_len, latent_dim + rope_dim] of each request

    @property
    def arrays(self) -> tuple[jax.Array | int, ...]:
        """The positional arguments, in order."""
        return (
            *(self.q_latent, self.q_rope, self.kv_cache, self.row),
            *(self.block_tables, self.seq_lens, self.query_start_loc),
        )

    @property
    def q_np(self) -> np.ndarray:  # f32[num_tokens, num_q_heads, latent_dim + rope_dim]
        parts = (np.asarray(q).astype(np.float32) for q in (self.q_latent, self.q_rope))
        return np.concatenate(list(parts), axis=-1)


def _decodes(*seq_lens: int) -> tuple[tuple[int, int], ...]:
    return tuple((1, seq_len) for seq_len in seq_lens)


DECODE_CASES: tuple[LatentAttentionCase, ...] = (
    LatentAttentionCase(name="ragged_decodes", requests=_decodes(5, 16, 33, 1, 64, 200)),
    LatentAttentionCase(
        name="empty_and_idle_requests",
        requests=((0, 0), (1, 9), (0, 40), (1, 65), (0, 0), (1, 0)),
        num_padding_tokens=3,
    ),
    LatentAttentionCase(
        name="padding_only", requests=((0, 0),) * 3, num_padding_tokens=8, max_blocks_per_req=2
    ),
    LatentAttentionCase(name="one_request", requests=_decodes(300), num_padding_tokens=0),
    LatentAttentionCase(name="one_block", requests=_decodes(11), max_blocks_per_req=1),
    LatentAttentionCase(name="many_chunks", requests=_decodes(1500, 3, 700), block_size=64),
    LatentAttentionCase(name="block_8", requests=_decodes(7, 8, 9, 130), block_size=8),
    LatentAttentionCase(name="block_256", requests=_decodes(255, 257), block_size=256),
    LatentAttentionCase(
        name="unused_columns", requests=_decodes(40, 3), num_unused_columns=16, num_q_heads=3
    ),
    LatentAttentionCase(
        name="deepseek_heads_16",
        requests=_decodes(70, 129),
        num_q_heads=16,
        latent_dim=512,
        rope_dim=64,
        dtype="bfloat16",
        scale=192**-0.5,
    ),
    LatentAttentionCase(
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
MIXED_CASES: tuple[LatentAttentionCase, ...] = (
    LatentAttentionCase(name="prompt", requests=((40, 40),), num_padding_tokens=0),
    LatentAttentionCase(
        name="mixed", requests=((1, 33), (20, 20), (0, 0), (7, 130), (1, 1), (2, 64), (0, 9))
    ),
    LatentAttentionCase(
        name="chunks_over_long_contexts", requests=((70, 700), (33, 400), (1, 500)), block_size=64
    ),
    LatentAttentionCase(
        name="mixed_with_unused_columns",
        requests=((1, 33), (20, 50)),
        num_unused_columns=16,
        dtype="bfloat16",
    ),
    LatentAttentionCase(
        name="mixed_bfloat16_as_uint16",
        requests=((1, 33), (20, 20), (7, 130)),
        dtype="bfloat16",
        is_uint16=True,
    ),
    LatentAttentionCase(
        name="mixed_float16_as_uint16",
        requests=((1, 33), (20, 20)),
        dtype="float16",
        is_uint16=True,
        num_q_heads=3,
    ),
    LatentAttentionCase(
        name="deepseek_mixed",
        requests=((1, 70), (35, 129)),
        num_q_heads=16,
        latent_dim=512,
        rope_dim=64,
        dtype="bfloat16",
        scale=192**-0.5,
    ),
)
CASES = DECODE_CASES + MIXED_CASES


def build_inputs(case: LatentAttentionCase, seed: int = 0) -> LatentAttentionInputs:
    """Draws sequences, lays them into scattered blocks, and poisons everything else."""
    rng = np.random.default_rng(seed)
    num_query_np = np.array([num_query for num_query, _ in case.requests])
    seq_lens_np = np.array([seq_len for _, seq_len in case.requests])
    num_needed_np = -(-seq_lens_np // case.block_size)
    max_blocks_per_req = case.max_blocks_per_req or int(num_needed_np.max()) + 1
    num_blocks = int(num_needed_np.sum()) + 3
    cache_dim = case.latent_dim + case.rope_dim

    width = cache_dim + case.num_unused_columns
    cache_shape = (case.num_rows, num_blocks, 1, case.block_size, width)
    kv_cache_np = np.full(cache_shape, np.nan, np.float32)
    garbage_ids = np.array([0, num_blocks - 1, -7, num_blocks + 1000])
    block_tables_np = rng.choice(garbage_ids, (len(case.requests), max_blocks_per_req))
    free_blocks = list(1 + rng.permutation(num_blocks - 1))
    cached_np = tuple(_draw(rng, case.dtype, seq_len, cache_dim) for seq_len in seq_lens_np)
    for req_idx, vectors in enumerate(cached_np):
        for position, vector in enumerate(vectors):
            logical_block, offset = divmod(position, case.block_size)
            if offset == 0:
                block_tables_np[req_idx, logical_block] = free_blocks.pop()
            block_id = block_tables_np[req_idx, logical_block]
            kv_cache_np[case.row, block_id, 0, offset, :cache_dim] = vector

    num_tokens = int(num_query_np.sum()) + case.num_padding_tokens
    q_np = _draw(rng, case.dtype, num_tokens, case.num_q_heads, cache_dim)
    q_np = q_np.astype(jnp.dtype(case.dtype))
    kv_dtype = jnp.dtype(case.dtype) if case.is_uint16 else None
    stored_np = kv_cache_np.astype(jnp.dtype(case.dtype))
    query_start_loc_np = np.concatenate([[0], np.cumsum(num_query_np)])
    # `jnp.asarray` would compile a program for each dtype and shape.
    return LatentAttentionInputs(
        q_latent=jax.device_put(q_np[..., : case.latent_dim]),
        q_rope=jax.device_put(q_np[..., case.latent_dim :]),
        kv_cache=jax.device_put(stored_np.view(np.uint16) if case.is_uint16 else stored_np),
        row=case.row,
        block_tables=jax.device_put(block_tables_np.astype(np.int32)),
        seq_lens=jax.device_put(seq_lens_np.astype(np.int32)),
        query_start_loc=jax.device_put(query_start_loc_np.astype(np.int32)),
        rules={"scale": case.scale, "kv_dtype": kv_dtype, "max_query_len": case.max_query_len},
        cached_np=cached_np,
    )


def _draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draws normal numbers that `dtype` holds exactly, as float32."""
    return rng.standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float32)
