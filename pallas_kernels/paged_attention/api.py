"""Public op `paged_attention`: its contract, checks, and choice of implementation."""

import jax
import jax.numpy as jnp

from pallas_kernels.argument_checks import (
    require_at_least,
    require_finite,
    require_float,
    require_int32,
    require_sequences,
    require_shape,
)
from pallas_kernels.cache_layout import check_kv_cache, check_row
from pallas_kernels.dispatch import Body, mosaic_bodies, run_op
from pallas_kernels.paged_attention.distance_bias import check_distance_bias
from pallas_kernels.paged_attention.reference import paged_attention_reference
from pallas_kernels.paged_attention.xla import paged_attention_xla
from pallas_kernels.paged_attention.xla_batch_invariant import paged_attention_batch_invariant
from pallas_kernels.stored_dtype import check_kv_dtype
from pallas_kernels.target import Target

_OP = "paged_attention"
_BODIES: dict[str, Body] = {
    "reference": paged_attention_reference,
    "xla": paged_attention_xla,
    **mosaic_bodies("pallas_kernels.paged_attention", "paged_attention", "gpu", "tpu"),
}
# One body for all devices, because the bits of a token must not depend on the batch.
_BATCH_INVARIANT_BODIES: dict[str, Body] = {"xla": paged_attention_batch_invariant}
_BODIES_WITH_LIMITS = {name: _BODIES[name] for name in ("reference", "xla")}


def paged_attention(
    q: jax.Array,  # f[num_tokens, num_q_heads, head_dim]
    kv_cache: jax.Array,  # [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]
    row: jax.Array | int,  # i32[]
    block_tables: jax.Array,  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array,  # i32[num_reqs]
    query_start_loc: jax.Array,  # i32[num_reqs + 1]
    *,
    scale: float,
    is_causal: bool = True,
    sliding_window: int | None = None,
    chunk_size: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,  # f32[num_q_heads]
    alibi_slopes: jax.Array | None = None,  # f32[num_q_heads]
    distance_factors: jax.Array | None = None,  # f[num_tokens, num_q_heads, num_profiles]
    distance_profiles: jax.Array | None = None,  # f[num_profiles, num_distances]
    kv_dtype: jnp.dtype | None = None,
    max_query_len: int | None = None,
    key_limits: jax.Array | None = None,  # i32[num_tokens]
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | None = None,
    target: Target | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes causal attention of each request's query tokens over its own cached tokens.

    The batch is ragged: prompts, chunks of prompts, single decode tokens and empty requests in
    any order. A request's query tokens are the last positions of its sequence: with seq_len 10 and
    3 query tokens, positions 7, 8 and 9. A token at position p reads positions j <= p; with a
    window w, only j > p - w; with chunks of c, only its own chunk (j // c == p // c). Query head h
    reads KV head `h // (num_q_heads // num_kv_heads)`.

    Args:
        kv_cache: The keys of block b are at index 2 * b of the second axis, its values at
            2 * b + 1 (`cache_layout.py`). A float of 16 bits or more, or uint16 with `kv_dtype`.
        row: Which row of the cache (the layer's index in its group), in `[0, num_rows)`.
        block_tables: Physical block of each logical block, in `[0, num_blocks)`. Entries past a
            sequence's end, or wholly left of its window or chunk, may hold anything. So may memory
            that was never written, NaN included. Neither changes the result.
        seq_lens: Tokens in the cache after this step's write, in
            `[0, max_blocks_per_req * block_size]`; 0 is an empty request.
        query_start_loc: Starts at 0, non-decreasing. Request r owns tokens
            `[query_start_loc[r], query_start_loc[r + 1])`; with causal attention, at most
            `seq_lens[r]` of them. Tokens from the last entry on are padding.
        scale: Factor of the logits, usually `head_dim ** -0.5`.
        is_causal: If false, every token of a request reads all its `seq_lens[r]` positions, and
            `sliding_window` and `chunk_size` must be None.
        sliding_window: Positions that a token sees, its own included; `None` means all.
        chunk_size: Length of the chunks of chunked local attention, counted from position 0; `None`
            means no chunks. Must be None with a window.
        soft_cap: `logits = soft_cap * tanh(logits / soft_cap)`, after the scale, before the mask.
        sinks: One more logit per head, which counts only in the softmax's denominator.
        alibi_slopes: Each head's slope: `slope * (j - p)` is added to the logit of a key at
            position j, after the soft cap. Only the bodies in plain XLA and the reference support
            it. `None` adds nothing.
        distance_factors: `distance_factors[t, h] @ distance_profiles[:, p - j]` is added to the
            logit of head h of token t, at position p, for a key at position j, after the soft cap.
            Distances `p - j` outside of `[0, num_distances)` add nothing. Only the bodies in plain
            XLA and the reference support it. `None` adds nothing.
        distance_profiles: Biases by distance, which `distance_factors` mix. It is needed with
            `distance_factors`, and not used without.
        kv_dtype: The float whose bits a uint16 cache holds, float16 or bfloat16; `None` for any
            other cache. Only the bodies in plain XLA and the reference support it.
        max_query_len: A promise that no request has more query tokens, so a body may omit the
            code for longer requests. 1 means decode attention; `None` promises nothing.
        key_limits: For each token, how many keys it sees: the first ones of its request. In
            `[0, seq_lens[r]]`, not decreasing within a request; padding may hold anything. A
            request may then have more query tokens than keys. Under context parallelism, a device
            has some of a request's keys, and the limit of a token counts only these keys.
            None: by position. Attention must be causal, without a window, chunks, slopes and
            factors of distances. Only the bodies in plain XLA and the reference support it.
        return_lse: Whether to return the second result too.
        batch_invariant: Whether the bits of a token's result must not depend on the other tokens
            and requests in the call, the places of its blocks, or how its request's tokens are
            split over calls of the same shapes. Slower.
        implementation: `None` picks the fastest body on `target`.
        target: What the program is compiled for; `None` is JAX's default device.

    Returns:
        The output, f[num_tokens, num_q_heads, head_dim] in q's dtype. It is zero for padding tokens
        and for tokens that see no key. With `return_lse`, also the logarithm of the softmax's
        denominator (the sum of exp(logit) over all keys seen and the sink), f32[num_tokens,
        num_q_heads]. It is -inf for these tokens. `merge_attention_states` merges such pairs.

    Raises:
        ValueError: A shape, a dtype, a static argument or the implementation's name does not fit.
            Values are traced, so they are not checked here.

    Source: PagedAttention, arXiv:2309.06180, section 4.1; sinks: gpt-oss; chunks: Llama 4;
        ALiBi: arXiv:2108.12409.
    """
    _check_arrays(q, kv_cache, block_tables, seq_lens, query_start_loc)
    check_row(_OP, row, num_rows=kv_cache.shape[0])
    check_kv_dtype(_OP, kv_cache.dtype, kv_dtype)
    require_finite(_OP, "scale", scale)
    _check_rules(is_causal, sliding_window, chunk_size, soft_cap, max_query_len)
    if sinks is not None:
        require_shape(_OP, "sinks", sinks, (q.shape[1],))
        require_float(_OP, sinks=sinks)
    if alibi_slopes is not None:
        require_shape(_OP, "alibi_slopes", alibi_slopes, (q.shape[1],))
        require_float(_OP, alibi_slopes=alibi_slopes)
    extra = {}
    if distance_factors is not None:
        check_distance_bias(_OP, q, distance_factors, distance_profiles)
        extra = {"distance_factors": distance_factors, "distance_profiles": distance_profiles}
    if 0 in (*q.shape, *block_tables.shape):
        return _empty_result(q, return_lse)
    row = jnp.asarray(row, jnp.int32)
    bodies = _BODIES
    if key_limits is not None:
        require_shape(_OP, "key_limits", key_limits, (q.shape[0],))
        require_int32(_OP, key_limits=key_limits)
        if (is_causal, sliding_window, chunk_size, alibi_slopes) != (True, None, None, None):
            raise ValueError(
                f"{_OP}: key_limits need causal attention without a window, chunks and slopes: got "
                f"{is_causal=}, {sliding_window=}, {chunk_size=}, {alibi_slopes=}."
            )
        if distance_factors is not None:
            raise ValueError(f"{_OP}: got key_limits and distance_factors, wanted one of them.")
        bodies, extra = _BODIES_WITH_LIMITS, {"key_limits": key_limits}
    out, lse = run_op(
        *(_OP, _BATCH_INVARIANT_BODIES if batch_invariant else bodies, implementation, target),
        *(q, kv_cache, row, block_tables, seq_lens, query_start_loc),
        scale=scale,
        is_causal=is_causal,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        soft_cap=soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        kv_dtype=kv_dtype,
        max_query_len=max_query_len,
        **extra,
    )
    return (out, lse) if return_lse else out


def _empty_result(q: jax.Array, return_lse: bool) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The result if there are no tokens, requests or blocks, so that no token sees a key."""
    out = jnp.zeros(q.shape, q.dtype)
    return (out, jnp.full(q.shape[:2], -jnp.inf, jnp.float32)) if return_lse else out


def _check_rules(
    is_causal: bool,
    sliding_window: int | None,
    chunk_size: int | None,
    soft_cap: float | None,
    max_query_len: int | None,
) -> None:
    limits = {"sliding_window": sliding_window, "chunk_size": chunk_size}
    given = {name: value for name, value in limits.items() if value is not None}
    for name, value in {**given, "max_query_len": max_query_len}.items():
        if value is not None:
            require_at_least(_OP, name, value, 1)
    if len(given) > (1 if is_causal else 0):
        raise ValueError(
            f"{_OP}: too many limits on what a token sees: got {given} with {is_causal=}, wanted "
            "at most one with causal attention, and none without."
        )
    if soft_cap is None:
        return
    require_finite(_OP, "soft_cap", soft_cap)
    if soft_cap <= 0:
        raise ValueError(
            f"{_OP}: soft_cap is out of range: got {soft_cap}, wanted more than 0 or None."
        )


def _check_arrays(
    q: jax.Array,
    kv_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
) -> None:
    check_kv_cache(_OP, kv_cache, num_parts=2)
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    require_shape(_OP, "q", q, ("num_tokens", "num_q_heads", head_dim))
    if q.shape[1] % num_kv_heads:
        raise ValueError(
            f"{_OP}: q has the wrong number of heads: got {q.shape[1]}, "
            f"wanted a multiple of the cache's num_kv_heads={num_kv_heads}."
        )
    require_sequences(_OP, block_tables, seq_lens, query_start_loc)
    require_float(_OP, q=q)
