"""Plain-JAX bodies of `latent_attention`: `paged_attention` with one cached vector per token.

All query heads read one KV head. Its keys are the cached vectors, its values their first columns.
Temporary memory: the output in float32, and tiles. It does not depend on the length of the context.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.xla import attend_all_rows
from pallas_kernels.paged_attention.xla_batch_invariant import attend_rows_alike
from pallas_kernels.paged_attention.xla_problem import AttentionProblem, rows_at
from pallas_kernels.stored_dtype import as_values


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProblem(AttentionProblem):
    """The arguments of one call of the op.

    `q` is f[num_tokens, 1, num_q_heads, latent_dim + rope_dim]. `kv_cache` is [num_rows,
    num_blocks, 1, block_size, width].
    """

    latent_dim: int

    @property
    def num_blocks(self) -> int:
        return self.kv_cache.shape[1]

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.q.shape[:-1], self.latent_dim)

    def gather_blocks(
        self, block_ids: jax.Array, is_real: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """See `AttentionProblem.gather_blocks`. Keys and values are one gather."""
        stored = rows_at(self.kv_cache, self.row, jnp.where(is_real, block_ids, 0))
        vectors = as_values(stored, self.kv_dtype)[..., : self.q.shape[-1]]
        return vectors, vectors[..., : self.latent_dim]


def latent_attention_xla(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """See `api.latent_attention`."""
    arrays = (q_latent, q_rope, kv_cache, row, block_tables, seq_lens, query_start_loc)
    problem = make_problem(*arrays, scale=scale, kv_dtype=kv_dtype, key_limits=key_limits)
    out, lse = attend_all_rows(problem, max_query_len)
    return out[:, 0].astype(q_latent.dtype), lse[:, 0]


def latent_attention_batch_invariant(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    max_query_len: int | None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
) -> tuple[jax.Array, jax.Array]:  # f[num_tokens, num_q_heads, latent_dim], f32[num_tokens, ...]
    """The body whose result for a token has the same bits in every batch."""
    del max_query_len  # all tokens are computed alike
    arrays = (q_latent, q_rope, kv_cache, row, block_tables, seq_lens, query_start_loc)
    problem = make_problem(*arrays, scale=scale, kv_dtype=kv_dtype, key_limits=key_limits)
    out, lse = attend_rows_alike(problem)
    return out[:, 0].astype(q_latent.dtype), lse[:, 0]


def make_problem(
    q_latent: jax.Array,
    q_rope: jax.Array,
    kv_cache: jax.Array,
    row: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    kv_dtype: jnp.dtype | None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
) -> LatentProblem:
    """The arguments of a body as a problem of `paged_attention`."""
    return LatentProblem(
        q=jnp.concatenate([q_latent, q_rope], axis=-1)[:, None],
        kv_cache=kv_cache,
        row=row,
        block_tables=block_tables,
        seq_lens=seq_lens,
        query_start_loc=query_start_loc,
        scale=scale,
        kv_dtype=kv_dtype,
        key_limits=key_limits,
        latent_dim=q_latent.shape[-1],
    )
