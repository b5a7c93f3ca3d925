"""Named example inputs of `paged_attention`, for tests and benchmarks.

All memory that a sequence does not own is NaN, and table entries that nothing may follow hold
garbage, so a body that reads where it must not shows it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionCase:
    """Sizes of one example. `requests` holds (query tokens, seq_len) of each request."""

    name: str
    requests: tuple[tuple[int, int], ...]
    num_padding_tokens: int = 3
    max_blocks_per_req: int | None = None  # None: as many as the longest request needs, plus one
    num_rows: int = 2
    row: int = 1
    num_q_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    v_head_dim: int | None = None  # None: head_dim
    block_size: int = 16
    dtype: str = "float32"
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionInputs:
    """Arguments of `paged_attention`, and the same keys and values not paged."""

    q: jax.Array  # f[num_tokens, num_q_heads, head_dim]
    k_cache: jax.Array  # f[num_rows, num_blocks, num_kv_heads, block_size, head_dim]
    v_cache: jax.Array  # f[num_rows, num_blocks, num_kv_heads, block_size, v_head_dim]
    row: int
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    scale: float
    sliding_window: int | None
    soft_cap: float | None
    sinks: jax.Array | None  # f32[num_q_heads]
    keys_np: tuple[np.ndarray, ...]  # of each request, f32[seq_len, num_kv_heads, head_dim]
    values_np: tuple[np.ndarray, ...]  # of each request, f32[seq_len, num_kv_heads, v_head_dim]

    @property
    def arrays(self) -> tuple[jax.Array | int, ...]:
        """The positional arguments, in order."""
        return (
            self.q,
            self.k_cache,
            self.v_cache,
            self.row,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )


_MIXED = ((1, 40), (20, 70), (1, 1), (7, 7), (1, 64))

CASES: tuple[PagedAttentionCase, ...] = (
    PagedAttentionCase(
        name="decode_mha", requests=((1, 5), (1, 16), (1, 33)), num_kv_heads=4, num_padding_tokens=0
    ),
    PagedAttentionCase(
        name="prompts_gqa_head_dim_64",
        requests=((37, 37), (5, 20), (16, 16)),
        num_q_heads=8,
        head_dim=64,
    ),
    PagedAttentionCase(
        name="mixed_mqa_head_dim_128",
        requests=_MIXED,
        num_kv_heads=1,
        head_dim=128,
        block_size=32,
    ),
    PagedAttentionCase(
        name="mixed_head_dim_80_narrow_v",
        requests=_MIXED,
        head_dim=80,
        v_head_dim=48,
        block_size=8,
    ),
    PagedAttentionCase(
        name="many_tiles_and_chunks",
        requests=((150, 300), (1, 513), (0, 0), (65, 65), (1, 700), (1, 129)),
        block_size=64,
    ),
    PagedAttentionCase(
        name="long_chunk_window",
        requests=((100, 400), (1, 500), (1, 30)),
        sliding_window=70,
    ),
    PagedAttentionCase(name="mixed_window", requests=_MIXED, block_size=8, sliding_window=20),
    PagedAttentionCase(name="window_of_one", requests=_MIXED, sliding_window=1),
    PagedAttentionCase(name="mixed_soft_cap", requests=_MIXED, soft_cap=1.5),
    PagedAttentionCase(name="mixed_sinks", requests=_MIXED, has_sinks=True),
    PagedAttentionCase(
        name="empty_requests",
        requests=((0, 0), (1, 9), (0, 0), (0, 12), (3, 3), (0, 0)),
        has_sinks=True,
    ),
    PagedAttentionCase(
        name="padding_only",
        requests=((0, 0), (0, 0), (0, 0)),
        num_padding_tokens=8,
        max_blocks_per_req=2,
        has_sinks=True,
    ),
    PagedAttentionCase(name="one_token", requests=((1, 21),), num_padding_tokens=0),
    PagedAttentionCase(name="one_prompt", requests=((9, 9),), num_padding_tokens=0),
    PagedAttentionCase(
        name="as_many_tokens_as_requests_but_a_prompt",
        requests=((0, 0), (3, 17), (0, 0)),
        num_padding_tokens=0,
    ),
    PagedAttentionCase(name="mixed_bfloat16", requests=_MIXED, dtype="bfloat16"),
    PagedAttentionCase(name="mixed_float16", requests=_MIXED, dtype="float16", head_dim=64),
    PagedAttentionCase(
        name="everything_bfloat16",
        requests=((1, 40), (0, 0), (20, 70), (0, 5), (1, 1), (33, 33)),
        num_padding_tokens=9,
        num_q_heads=8,
        dtype="bfloat16",
        sliding_window=24,
        soft_cap=5.0,
        has_sinks=True,
    ),
)


def build_inputs(case: PagedAttentionCase, seed: int = 0) -> PagedAttentionInputs:
    """Draws sequences, lays them into scattered blocks, and poisons everything else."""
    rng = np.random.default_rng(seed)
    v_head_dim = case.v_head_dim or case.head_dim
    num_query_np = np.array([num_query for num_query, _ in case.requests])
    seq_lens_np = np.array([seq_len for _, seq_len in case.requests])
    num_needed_np = -(-seq_lens_np // case.block_size)
    max_blocks_per_req = case.max_blocks_per_req or int(num_needed_np.max()) + 1
    num_blocks = int(num_needed_np.sum()) + 3
    cache_shape = (case.num_rows, num_blocks, case.num_kv_heads, case.block_size)
    k_cache_np = np.full((*cache_shape, case.head_dim), np.nan, np.float32)
    v_cache_np = np.full((*cache_shape, v_head_dim), np.nan, np.float32)
    garbage_ids = np.array([0, num_blocks - 1, -7, num_blocks + 1000])
    block_tables_np = rng.choice(garbage_ids, (len(case.requests), max_blocks_per_req))

    free_blocks = list(1 + rng.permutation(num_blocks - 1))
    keys_np, values_np = [], []
    for req_idx, (num_query, seq_len) in enumerate(case.requests):
        keys_np.append(_draw(rng, case.dtype, seq_len, case.num_kv_heads, case.head_dim))
        values_np.append(_draw(rng, case.dtype, seq_len, case.num_kv_heads, v_head_dim))
        window = case.sliding_window or seq_len
        first_seen = max(0, seq_len - num_query - window + 1)
        for position in range(first_seen, seq_len):
            logical_block, offset = divmod(position, case.block_size)
            if offset == 0 or position == first_seen:
                block_tables_np[req_idx, logical_block] = free_blocks.pop()
            block_id = block_tables_np[req_idx, logical_block]
            k_cache_np[case.row, block_id, :, offset] = keys_np[-1][position]
            v_cache_np[case.row, block_id, :, offset] = values_np[-1][position]

    num_tokens = int(num_query_np.sum()) + case.num_padding_tokens
    q_np = _draw(rng, case.dtype, num_tokens, case.num_q_heads, case.head_dim)
    sinks_np = rng.standard_normal(case.num_q_heads)
    return PagedAttentionInputs(
        q=jnp.asarray(q_np, case.dtype),
        k_cache=jnp.asarray(k_cache_np, case.dtype),
        v_cache=jnp.asarray(v_cache_np, case.dtype),
        row=case.row,
        block_tables=jnp.asarray(block_tables_np, jnp.int32),
        seq_lens=jnp.asarray(seq_lens_np, jnp.int32),
        query_start_loc=jnp.asarray(np.concatenate([[0], np.cumsum(num_query_np)]), jnp.int32),
        scale=case.head_dim**-0.5,
        sliding_window=case.sliding_window,
        soft_cap=case.soft_cap,
        sinks=jnp.asarray(sinks_np, jnp.float32) if case.has_sinks else None,
        keys_np=tuple(keys_np),
        values_np=tuple(values_np),
    )


def _draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draws normal numbers that `dtype` holds exactly, as float32."""
    return rng.standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float32)
