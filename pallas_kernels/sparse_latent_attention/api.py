"""Public op `sparse_latent_attention`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_finite,
    require_float,
    require_int32,
    require_not_empty,
    require_sequences,
    require_shape,
)
from pallas_kernels.cache_layout import check_row
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.sparse_latent_attention.reference import sparse_latent_attention_reference
from pallas_kernels.sparse_latent_attention.xla import sparse_latent_attention_xla
from pallas_kernels.stored_dtype import check_kv_dtype
from pallas_kernels.target import Target

_OP = "sparse_latent_attention"
_BODIES: dict[str, Body] = {
    "reference": sparse_latent_attention_reference,
    "xla": sparse_latent_attention_xla,
}


def sparse_latent_attention(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, top_k]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # f[num_tokens, num_q_heads, latent_dim]
    """Attends each query token to the cached latents at the given positions of its sequence.

    Queries, cache and result are as in `latent_attention`. The caller chooses the positions
    (`index_top_k`), and sees to it that no token attends to later ones.

    Temporary memory does not depend on the lengths of sequences or on top_k.

    Args:
        kv_cache: As in `latent_attention`; so are the arguments before `positions`.
        positions: Each in `[0, seq_len)` of the token's request. A position past the end of the
            sequence stands for no token. Such entries come after all others of a row.
        scale: As in `latent_attention`; so is `kv_dtype`.
        batch_invariant: As in `paged_attention`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output in the dtype of `q_latent`, zero for padding tokens and for tokens that attend to
        nothing.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """
    require_shape(_OP, "q_latent", q_latent, ("num_tokens", "num_q_heads", "latent_dim"))
    require_shape(_OP, "q_rope", q_rope, (*q_latent.shape[:2], "rope_dim"))
    require_shape(_OP, "kv_cache", kv_cache, ("num_rows", "num_blocks", 1, "block_size", "width"))
    require_not_empty(_OP, "kv_cache", kv_cache)
    require_sequences(_OP, block_tables, seq_lens, query_start_loc)
    require_shape(_OP, "positions", positions, (q_latent.shape[0], "top_k"))
    require_float(_OP, q_latent=q_latent, q_rope=q_rope)
    require_int32(_OP, positions=positions)
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    check_kv_dtype(_OP, kv_cache.dtype, kv_dtype)
    require_finite(_OP, "scale", scale)
    cache_dim = q_latent.shape[2] + q_rope.shape[2]
    if cache_dim > kv_cache.shape[-1]:
        raise ValueError(
            f"{_OP}: queries are wider than the cached vectors: got latent_dim + rope_dim = "
            f"{cache_dim}, wanted at most the cache's last axis, {kv_cache.shape[-1]}."
        )
    if q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"{_OP}: both parts of the queries must have one dtype: got {q_latent.dtype} and "
            f"{q_rope.dtype}."
        )
    if 0 in (*q_latent.shape, *block_tables.shape, *positions.shape):  # nothing is seen
        return jnp.zeros(q_latent.shape, q_latent.dtype)
    return run_op(
        *(_OP, _BODIES, implementation, target),
        *(q_latent, q_rope, kv_cache, jnp.asarray(row, jnp.int32)),
        *(block_tables, seq_lens, query_start_loc, positions),
        scale=scale,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )
