"""Public op `latent_attention`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_at_least,
    require_finite,
    require_float,
    require_int32,
    require_not_empty,
    require_sequences,
    require_shape,
)
from pallas_kernels.cache_layout import check_row
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.latent_attention.reference import latent_attention_reference
from pallas_kernels.latent_attention.xla import (
    latent_attention_batch_invariant,
    latent_attention_xla,
)
from pallas_kernels.stored_dtype import check_kv_dtype
from pallas_kernels.target import Target

_OP = "latent_attention"
_BODIES: dict[str, Body] = {
    "reference": latent_attention_reference,
    "xla": latent_attention_xla,
    **mosaic_bodies("pallas_kernels.latent_attention", _OP, "gpu"),
}
# One body for all devices, because the bits of a token must not depend on the batch.
_BATCH_INVARIANT_BODIES: dict[str, Body] = {"xla": latent_attention_batch_invariant}
_BODIES_WITH_LIMITS = {name: _BODIES[name] for name in ("reference", "xla")}


def latent_attention(
    q_latent: jax.Array,  # f[num_tokens, num_q_heads, latent_dim]
    q_rope: jax.Array,  # f[num_tokens, num_q_heads, rope_dim]
    kv_cache: jax.Array,  # [num_rows, num_blocks, 1, block_size, width]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    kv_dtype: jnp.dtype | None = None,
    max_query_len: int | None = None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes causal attention of query tokens over cached latents: MLA in its absorbed form.

    A token has one cached vector for all heads: a latent, followed by a key that carries the rotary
    position. Head h of plain MLA has the key `[W_uk[h] @ latent, rope key]` and the value
    `W_uv[h] @ latent`. In the absorbed form, the caller multiplies queries by W_uk,
    `q_latent[h] = W_uk[h].T @ q_nope[h]`, and the output by W_uv, `W_uv[h] @ out[h]`. In between,
    all heads read the same memory: the key is the cached vector, the value is its latent.

    The batch is ragged, as in `paged_attention`: prompts, chunks of prompts, single decode tokens
    and empty requests in any order. A request's query tokens are the last positions of its
    sequence.

    Temporary memory does not depend on the lengths of sequences. In plain XLA it is the output in
    float32, and tiles of 32 query tokens and of up to 1,024 cached tokens.

    Args:
        kv_cache: One vector per token, written by `kv_scatter(..., v=None)`. `width` is at least
            latent_dim + rope_dim; columns after these are not used. A float of 16 bits or more, or
            uint16 with `kv_dtype`.
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        block_tables: Physical block of each logical block, in `[0, num_blocks)`. Entries past a
            sequence's end may hold anything. So may memory that was never written, NaN included.
            Neither changes the result.
        seq_lens: Tokens in the cache after this step's write, in
            `[0, max_blocks_per_req * block_size]`; 0 is an empty request.
        query_start_loc: Starts at 0, non-decreasing; request r owns tokens
            `[query_start_loc[r], query_start_loc[r + 1])`, at most `seq_lens[r]` of them. Tokens
            from the last entry on are padding.
        scale: Factor of the logits, as in the plain form: in DeepSeek `(128 + 64) ** -0.5`, times
            the factor of its YaRN scaling.
        kv_dtype: The float whose bits a uint16 cache holds, float16 or bfloat16; `None` for any
            other cache. Only the bodies in plain XLA and the reference support it.
        max_query_len: A promise that no request has more query tokens, so a body may omit the
            code for longer requests. 1 means decode attention; `None` promises nothing.
        key_limits: As in `paged_attention`.
        return_lse: Whether to return the second result too.
        batch_invariant: As in `paged_attention`.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output, f[num_tokens, num_q_heads, latent_dim] in the dtype of `q_latent`. It is zero
        for padding tokens and for tokens that see no key. With `return_lse`, also the logarithm of
        the softmax's denominator, f32[num_tokens, num_q_heads]. It is -inf for these tokens.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix B.
    """
    _check_arrays(q_latent, q_rope, kv_cache, block_tables, seq_lens, query_start_loc)
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    check_kv_dtype(_OP, kv_cache.dtype, kv_dtype)
    require_finite(_OP, "scale", scale)
    if max_query_len is not None:
        require_at_least(_OP, "max_query_len", max_query_len, 1)
    if 0 in (*q_latent.shape, *block_tables.shape):  # no token sees a key
        out = jnp.zeros(q_latent.shape, q_latent.dtype)
        lse = jnp.full(q_latent.shape[:2], -jnp.inf, jnp.float32)
        return (out, lse) if return_lse else out
    sequences = (block_tables, seq_lens, query_start_loc)
    bodies, limits = _BODIES, {}
    if key_limits is not None:
        require_shape(_OP, "key_limits", key_limits, (q_latent.shape[0],))
        require_int32(_OP, key_limits=key_limits)
        bodies, limits = _BODIES_WITH_LIMITS, {"key_limits": key_limits}
    out, lse = run_op(
        *(_OP, _BATCH_INVARIANT_BODIES if batch_invariant else bodies, implementation, target),
        *(q_latent, q_rope, kv_cache, jnp.asarray(row, jnp.int32), *sequences),
        scale=scale,
        kv_dtype=kv_dtype,
        max_query_len=max_query_len,
        **limits,
    )
    return (out, lse) if return_lse else out


def _check_arrays(
    q_latent: jax.Array,
    q_rope: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
) -> None:
    require_shape(_OP, "kv_cache", kv_cache, ("num_rows", "num_blocks", 1, "block_size", "width"))
    require_not_empty(_OP, "kv_cache", kv_cache)
    require_shape(_OP, "q_latent", q_latent, ("num_tokens", "num_q_heads", "latent_dim"))
    require_shape(_OP, "q_rope", q_rope, (*q_latent.shape[:2], "rope_dim"))
    cache_dim, width = q_latent.shape[2] + q_rope.shape[2], kv_cache.shape[-1]
    if cache_dim > width:
        raise ValueError(
            f"{_OP}: queries are wider than the cached vectors: got latent_dim + rope_dim = "
            f"{cache_dim}, wanted at most the cache's last axis, {width}."
        )
    require_sequences(_OP, block_tables, seq_lens, query_start_loc)
    require_float(_OP, q_latent=q_latent, q_rope=q_rope)
    if q_rope.dtype != q_latent.dtype:
        raise ValueError(
            f"{_OP}: both parts of the queries must have one dtype: got {q_latent.dtype} and "
            f"{q_rope.dtype}."
        )
