"""Named example inputs of `paged_attention`, for tests and benchmarks.

All memory that no sequence owns is NaN, and block table entries that must not be used hold garbage,
so a body that reads them gives wrong results.
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
    block_size: int = 16
    dtype: str = "float32"
    cache_dtype: str | None = None  # None: dtype
    is_uint16: bool = False  # the cache is uint16, the bits of the 16-bit `cache_dtype`
    is_causal: bool = True
    sliding_window: int | None = None
    chunk_size: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    scale: float | None = None  # None: head_dim ** -0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedAttentionInputs:
    """Arguments of `paged_attention`, and the same keys and values not paged."""

    q: jax.Array  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: int
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    rules: dict[
        str, float | int | bool | jnp.dtype | None
    ]  # the static keyword arguments of a body
    sinks: jax.Array | None  # f32[num_q_heads]
    # The stored keys and values of each request.
    keys_np: tuple[np.ndarray, ...]  # f32[seq_len, num_kv_heads, head_dim]
    values_np: tuple[np.ndarray, ...]  # f32[seq_len, num_kv_heads, head_dim]

    @property
    def arrays(self) -> tuple[jax.Array | int, ...]:
        """The positional arguments, in order."""
        return (
            self.q,
            self.kv_cache,
            self.row,
            self.block_tables,
            self.seq_lens,
            self.query_start_loc,
        )

    @property
    def traced_options(self) -> dict[str, jax.Array | None]:
        """The keyword arguments that are arrays."""
        return {"sinks": self.sinks, "alibi_slopes": None}


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
        name="mixed_head_dim_80",
        requests=_MIXED,
        head_dim=80,
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
    PagedAttentionCase(name="mixed_chunks", requests=_MIXED, block_size=8, chunk_size=24),
    PagedAttentionCase(
        name="long_chunks",
        requests=((100, 400), (1, 129), (1, 128), (150, 150)),
        block_size=64,
        chunk_size=128,
    ),
    PagedAttentionCase(name="custom_scale", requests=_MIXED, scale=0.37),
    PagedAttentionCase(
        name="not_causal", requests=((5, 40), (1, 70), (9, 3), (0, 8), (2, 0)), is_causal=False
    ),
    *(
        PagedAttentionCase(
            name=f"head_dim_{head_dim}_block_{block_size}",
            requests=((1, 40), (20, 70), (1, 300)),
            num_kv_heads=1,
            head_dim=head_dim,
            block_size=block_size,
        )
        for head_dim, block_size in (
            (80, 8),
            (96, 16),
            (128, 64),
            (192, 128),
            (256, 256),
            (512, 16),
        )
    ),
    PagedAttentionCase(
        name="everything_float32",
        requests=((1, 40), (0, 0), (20, 70), (0, 5), (1, 1), (33, 33)),
        num_q_heads=8,
        sliding_window=24,
        soft_cap=5.0,
        has_sinks=True,
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

# Queries wider than the cache. Only the bodies in plain XLA and the reference support them.
NARROW_CACHE_CASES: tuple[PagedAttentionCase, ...] = (
    PagedAttentionCase(name="mixed_float16_cache", requests=_MIXED, cache_dtype="float16"),
    PagedAttentionCase(
        name="decode_window_float16_cache",
        requests=((1, 40),) * 9,
        cache_dtype="float16",
        sliding_window=20,
        has_sinks=True,
    ),
    PagedAttentionCase(
        name="bfloat16_mixed_float16_cache",
        requests=_MIXED,
        dtype="bfloat16",
        cache_dtype="float16",
    ),
)

# A uint16 cache with the bits of 16-bit floats. Only the same bodies support it.
UINT16_CASES: tuple[PagedAttentionCase, ...] = (
    PagedAttentionCase(
        name="bfloat16_as_uint16", requests=_MIXED, dtype="bfloat16", is_uint16=True, num_rows=3
    ),
    PagedAttentionCase(
        name="everything_float16_as_uint16",
        requests=((1, 40), (0, 0), (20, 70), (0, 5), (1, 1), (33, 33)),
        num_q_heads=8,
        num_kv_heads=1,
        dtype="float16",
        is_uint16=True,
        sliding_window=24,
        soft_cap=5.0,
        has_sinks=True,
    ),
    PagedAttentionCase(
        name="decode_bfloat16_as_uint16",
        requests=((1, 40),) * 9,
        cache_dtype="bfloat16",
        is_uint16=True,
    ),
    PagedAttentionCase(
        name="float32_over_float16_as_uint16",
        requests=_MIXED,
        cache_dtype="float16",
        is_uint16=True,
    ),
)

# The largest length, cut into few blocks and into many. Heads are few and small, because the
# reference gives each token its own copy of its keys.
LONG_CASES: tuple[PagedAttentionCase, ...] = (
    PagedAttentionCase(
        name="decode_131072",
        requests=((1, 131_072), (1, 3)),
        num_padding_tokens=0,
        num_q_heads=2,
        num_kv_heads=1,
        head_dim=8,
        block_size=256,
        has_sinks=True,
    ),
    PagedAttentionCase(
        name="prompt_end_131072",
        requests=((2, 131_072), (1, 100)),
        num_padding_tokens=1,
        num_q_heads=1,
        num_kv_heads=1,
        head_dim=8,
    ),
)


def build_inputs(case: PagedAttentionCase, seed: int = 0) -> PagedAttentionInputs:
    """Draws sequences, lays them into scattered blocks, and poisons everything else."""
    rng = np.random.default_rng(seed)
    num_query_np = np.array([num_query for num_query, _ in case.requests])
    seq_lens_np = np.array([seq_len for _, seq_len in case.requests])
    num_needed_np = -(-seq_lens_np // case.block_size)
    max_blocks_per_req = case.max_blocks_per_req or int(num_needed_np.max()) + 1
    num_blocks = int(num_needed_np.sum()) + 3
    cache_shape = (case.num_rows, 2 * num_blocks, case.num_kv_heads, case.block_size, case.head_dim)
    kv_cache_np = np.full(cache_shape, np.nan, np.float32)
    garbage_ids = np.array([0, num_blocks - 1, -7, num_blocks + 1000])
    block_tables_np = rng.choice(garbage_ids, (len(case.requests), max_blocks_per_req))

    free_blocks = list(1 + rng.permutation(num_blocks - 1))
    cache_dtype = jnp.dtype(case.cache_dtype or case.dtype)
    keys_np, values_np = [], []
    for req_idx, (num_query, seq_len) in enumerate(case.requests):
        k_np = _draw(rng, case.dtype, seq_len, case.num_kv_heads, case.head_dim)
        v_np = _draw(rng, case.dtype, seq_len, case.num_kv_heads, case.head_dim)
        keys_np.append(k_np.astype(cache_dtype).astype(np.float32))
        values_np.append(v_np.astype(cache_dtype).astype(np.float32))
        first_seen = _first_seen(case, num_query, seq_len)
        for logical_block in range(first_seen // case.block_size, int(num_needed_np[req_idx])):
            block_id = free_blocks.pop()
            block_tables_np[req_idx, logical_block] = block_id
            # The first block stays NaN left of the first seen position.
            start = max(first_seen, logical_block * case.block_size)
            end = min(seq_len, (logical_block + 1) * case.block_size)
            offsets = slice(start % case.block_size, (end - 1) % case.block_size + 1)
            for part, stored_np in enumerate((keys_np, values_np)):
                written = stored_np[-1][start:end].transpose(1, 0, 2)
                kv_cache_np[case.row, 2 * block_id + part, :, offsets] = written

    num_tokens = int(num_query_np.sum()) + case.num_padding_tokens
    q_np = _draw(rng, case.dtype, num_tokens, case.num_q_heads, case.head_dim)
    sinks_np = rng.standard_normal(case.num_q_heads)
    stored_np = kv_cache_np.astype(cache_dtype)
    query_start_loc_np = np.concatenate([[0], np.cumsum(num_query_np)])
    # `jnp.asarray` would compile a program for each dtype and shape.
    return PagedAttentionInputs(
        q=jax.device_put(q_np.astype(jnp.dtype(case.dtype))),
        kv_cache=jax.device_put(stored_np.view(np.uint16) if case.is_uint16 else stored_np),
        row=case.row,
        block_tables=jax.device_put(block_tables_np.astype(np.int32)),
        seq_lens=jax.device_put(seq_lens_np.astype(np.int32)),
        query_start_loc=jax.device_put(query_start_loc_np.astype(np.int32)),
        rules={
            "scale": case.head_dim**-0.5 if case.scale is None else case.scale,
            "is_causal": case.is_causal,
            "sliding_window": case.sliding_window,
            "chunk_size": case.chunk_size,
            "soft_cap": case.soft_cap,
            "kv_dtype": cache_dtype if case.is_uint16 else None,
            "max_query_len": max(1, int(num_query_np.max(initial=0))),
        },
        sinks=jax.device_put(sinks_np.astype(np.float32)) if case.has_sinks else None,
        keys_np=tuple(keys_np),
        values_np=tuple(values_np),
    )


def _first_seen(case: PagedAttentionCase, num_query: int, seq_len: int) -> int:
    """The leftmost position that any query token of a request reads."""
    first_query = max(0, seq_len - num_query)
    if case.chunk_size is not None:
        return first_query // case.chunk_size * case.chunk_size
    if case.sliding_window is not None:
        return max(0, first_query - case.sliding_window + 1)
    return 0


def _draw(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    """Draws normal numbers that `dtype` holds exactly, as float32."""
    return rng.standard_normal(shape).astype(jnp.dtype(dtype)).astype(np.float32)
