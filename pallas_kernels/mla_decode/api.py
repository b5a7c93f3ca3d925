"""Public op `mla_decode`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_at_least,
    require_finite,
    require_float,
    require_int32,
    require_not_empty,
    require_shape,
)
from pallas_kernels.cache_layout import check_row
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.mla_decode.reference import mla_decode_reference
from pallas_kernels.mla_decode.xla import mla_decode_xla
from pallas_kernels.target import Target

_OP = "mla_decode"
_BODIES: dict[str, Body] = {
    "reference": mla_decode_reference,
    "xla": mla_decode_xla,
    **mosaic_bodies("pallas_kernels.mla_decode", _OP, "gpu"),
}


def mla_decode(
    q: jax.Array,  # f[num_tokens, num_q_heads, latent_dim + rope_dim]
    kv_cache: jax.Array,  # f[num_rows, num_blocks, 1, block_size, latent_dim + rope_dim]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    latent_dim: int,
    scale: float,
    return_lse: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attends each request's one query token to its cached latents: MLA in the absorbed form.

    A token has one cached vector for all heads: a latent, and beside it a key that carries the
    rotary position. Head h of plain MLA has the key `[W_uk[h] @ latent, rope key]` and the value
    `W_uv[h] @ latent`. Absorbed, W_uk goes to the query, which the caller has done already,
    `q[h] = [W_uk[h].T @ q_nope, q_rope]`, and W_uv to the output, which the caller does afterwards,
    `W_uv[h] @ out[h]`. In between every head reads the same memory: the key is the whole cached
    vector, the value its first `latent_dim` columns.

    The cache holds one vector per token, as of one KV head, and no values: write it with
    `kv_scatter(..., v=None)`.

    A request has one query token at most. To verify several tokens at once, or for a prompt, give
    each token a request of its own: the same blocks, and a `seq_lens` that ends with it.

    Args:
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        block_tables: Physical block of each logical block, in `[0, num_blocks)`. Entries past a
            sequence's end may hold anything, and so may all memory that was never written, NaN
            included: none of it reaches the result.
        seq_lens: Tokens in the cache after this step's write, in
            `[0, max_blocks_per_req * block_size]`; 0 is an empty request.
        query_start_loc: Starts at 0; each entry is the one before, or one more: request r owns
            token `query_start_loc[r]` if the next entry is more. Tokens from the last entry on are
            padding.
        latent_dim: Columns of the value; the rest of the cached vector is the rotary key.
        scale: Factor of the logits. That of the plain form, not of this one: in DeepSeek
            `(128 + 64) ** -0.5`, times what its YaRN scaling asks for.
        return_lse: Whether to return the second result too.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output, f[num_tokens, num_q_heads, latent_dim] in q's dtype, zero for padding tokens and
        for tokens that see nothing. With `return_lse` a pair: the output, and the logarithm of the
        softmax's denominator, f32[num_tokens, num_q_heads], -inf for these tokens.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix B.
    """
    require_shape(
        *(_OP, "kv_cache", kv_cache),
        ("num_rows", "num_blocks", 1, "block_size", "latent_dim + rope_dim"),
    )
    require_not_empty(_OP, "kv_cache", kv_cache)
    require_shape(_OP, "q", q, ("num_tokens", "num_q_heads", kv_cache.shape[-1]))
    require_shape(_OP, "block_tables", block_tables, ("num_reqs", "max_blocks_per_req"))
    num_reqs = block_tables.shape[0]
    require_shape(_OP, "seq_lens", seq_lens, (num_reqs,))
    require_shape(_OP, "query_start_loc", query_start_loc, (num_reqs + 1,))
    require_float(_OP, q=q, kv_cache=kv_cache)
    require_int32(
        _OP, block_tables=block_tables, seq_lens=seq_lens, query_start_loc=query_start_loc
    )
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    require_finite(_OP, "scale", scale)
    _check_latent_dim(kv_cache, latent_dim)
    if 0 in (*q.shape, *block_tables.shape):  # no tokens, requests or blocks: nothing is seen
        out = jnp.zeros((*q.shape[:2], latent_dim), q.dtype)
        return (out, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)) if return_lse else out
    out, lse = run_op(
        *(_OP, _BODIES, implementation, target),
        *(q, kv_cache, jnp.asarray(row, jnp.int32), block_tables, seq_lens, query_start_loc),
        latent_dim=latent_dim,
        scale=scale,
    )
    return (out, lse) if return_lse else out


def _check_latent_dim(kv_cache: jax.Array, latent_dim: int) -> None:
    require_at_least(_OP, "latent_dim", latent_dim, 1)
    if latent_dim > kv_cache.shape[-1]:
        raise ValueError(
            f"{_OP}: latent_dim is too large: got {latent_dim}, "
            f"wanted at most the cache's last axis, {kv_cache.shape[-1]}."
        )
