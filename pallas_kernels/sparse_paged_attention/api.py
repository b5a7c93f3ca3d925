"""Public op `sparse_paged_attention`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_finite,
    require_float,
    require_int32,
    require_sequences,
    require_shape,
)
from pallas_kernels.cache_layout import check_kv_cache, check_row
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.sparse_paged_attention.reference import sparse_paged_attention_reference
from pallas_kernels.sparse_paged_attention.xla import sparse_paged_attention_xla
from pallas_kernels.stored_dtype import check_kv_dtype
from pallas_kernels.target import Target

_OP = "sparse_paged_attention"
_BODIES: dict[str, Body] = {
    "reference": sparse_paged_attention_reference,
    "xla": sparse_paged_attention_xla,
}


def sparse_paged_attention(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    positions: jax.Array,  # i32[num_tokens, num_positions]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:  # f[num_tokens, num_q_heads, head_dim]
    """Attends each query token to the cached keys at the given positions of its sequence.

    Queries, cache and result are as in `paged_attention`. All heads of a token attend to the same
    positions. The caller chooses them (`index_top_k`), and must not choose positions after the
    token's own.

    Temporary memory does not depend on the lengths of sequences or on the number of positions.

    Args:
        kv_cache: As in `paged_attention`; so are the arguments before `positions`.
        positions: In `[0, seq_len)` of the token's request, each at most once per token. A position
            of `seq_len` or more, such as `NO_POSITION`, is ignored.
        scale: As in `paged_attention`; so are `kv_dtype` and `batch_invariant`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output in the dtype of `q`, zero for padding tokens and for tokens that attend to
        nothing.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1, without latents.
    """
    require_shape(_OP, "q", q, ("num_tokens", "num_q_heads", "head_dim"))
    check_kv_cache(_OP, kv_cache, num_parts=2)
    num_kv_heads, head_dim = kv_cache.shape[2], kv_cache.shape[4]
    require_shape(_OP, "q", q, ("num_tokens", "num_q_heads", head_dim))
    require_sequences(_OP, block_tables, seq_lens, query_start_loc)
    require_shape(_OP, "positions", positions, (q.shape[0], "num_positions"))
    require_float(_OP, q=q)
    require_int32(_OP, positions=positions)
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    check_kv_dtype(_OP, kv_cache.dtype, kv_dtype)
    require_finite(_OP, "scale", scale)
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"{_OP}: each KV head must serve the same number of query heads: got {q.shape[1]} "
            f"query heads, wanted a multiple of {num_kv_heads}."
        )
    if 0 in (*q.shape, *block_tables.shape, *positions.shape):  # nothing is seen
        return jnp.zeros(q.shape, q.dtype)
    return run_op(
        *(_OP, _BODIES, implementation, target),
        *(q, kv_cache, jnp.asarray(row, jnp.int32)),
        *(block_tables, seq_lens, query_start_loc, positions),
        scale=scale,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
    )
