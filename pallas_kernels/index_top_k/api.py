"""Public op `index_top_k`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_at_least,
    require_float,
    require_not_empty,
    require_sequences,
    require_shape,
)
from pallas_kernels.cache_layout import check_row
from pallas_kernels.dispatch import Body, run_op
from pallas_kernels.index_top_k.reference import index_top_k_reference
from pallas_kernels.index_top_k.xla import index_top_k_xla
from pallas_kernels.stored_dtype import check_kv_dtype
from pallas_kernels.target import Target

_OP = "index_top_k"
_BODIES: dict[str, Body] = {"reference": index_top_k_reference, "xla": index_top_k_xla}
# In place of a position: past the end of every sequence.
NO_POSITION = 2**31 - 1


def index_top_k(
    q: jax.Array,  # f[num_tokens, num_heads, key_dim]
    weights: jax.Array,  # f32[num_tokens, num_heads]
    key_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    top_k: int,
    key_step: int = 1,
    kv_dtype: jnp.dtype | None = None,
    batch_invariant: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array:
    """Chooses the tokens that each query token attends to, by their cached index keys.

    A query token scores itself and every earlier token of its sequence:
    `sum(weights[h] * relu(q[h] @ key) for h in heads)`. It chooses the `top_k` tokens with the
    largest scores. Of tokens with equal scores, it chooses earlier ones first.

    The batch is ragged, as in `latent_attention`. Temporary memory does not depend on the lengths
    of sequences.

    Args:
        weights: Of the heads. Constant factors of scores belong here.
        key_cache: One index key per token, written by `kv_scatter(..., v=None)`. `width` is at
            least key_dim; columns after these are not used. dtypes are as in `latent_attention`.
        block_tables: As in `latent_attention`; so are `seq_lens` and `query_start_loc`.
        top_k: At least 1. It may be larger than any sequence is long.
        key_step: Only positions `i * key_step + key_step - 1` have a key. Others are not chosen,
            and the cache may hold anything there. Example: with a `key_step` of 4, a token at
            position 9 chooses among positions 3 and 7.
        kv_dtype: As in `latent_attention`.
        batch_invariant: As in `paged_attention`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        Positions in the sequence, i32[num_tokens, top_k], those with larger scores first. A token
        with fewer tokens before it has `NO_POSITION` in its last entries, and a token of padding
        has `NO_POSITION` in all of them.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.

    Source: DeepSeek-V3.2, arXiv:2512.02556, section 2.1.
    """
    require_shape(_OP, "q", q, ("num_tokens", "num_heads", "key_dim"))
    num_tokens, num_heads, key_dim = q.shape
    require_shape(_OP, "weights", weights, (num_tokens, num_heads))
    require_shape(_OP, "key_cache", key_cache, ("num_rows", "num_blocks", 1, "block_size", "width"))
    require_not_empty(_OP, "key_cache", key_cache)
    require_sequences(_OP, block_tables, seq_lens, query_start_loc)
    require_float(_OP, q=q, weights=weights)
    check_row(_OP, row, num_rows=key_cache.shape[0])
    check_kv_dtype(_OP, key_cache.dtype, kv_dtype)
    require_at_least(_OP, "top_k", top_k, 1)
    require_at_least(_OP, "key_step", key_step, 1)
    if key_dim > key_cache.shape[-1]:
        raise ValueError(
            f"{_OP}: queries are wider than the cached keys: got key_dim = {key_dim}, wanted at "
            f"most the cache's last axis, {key_cache.shape[-1]}."
        )
    if 0 in (*q.shape, *block_tables.shape):
        return jnp.full((num_tokens, top_k), NO_POSITION, jnp.int32)
    return run_op(
        *(_OP, _BODIES, implementation, target),
        *(q, weights.astype(jnp.float32), key_cache, jnp.asarray(row, jnp.int32)),
        *(block_tables, seq_lens, query_start_loc),
        top_k=top_k,
        key_step=key_step,
        kv_dtype=kv_dtype,
        batch_invariant=batch_invariant,
        no_position=NO_POSITION,
    )
