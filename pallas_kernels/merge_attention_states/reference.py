"""Reference body of `merge_attention_states`: a softmax over the two lse."""

import jax
import jax.numpy as jnp


def merge_attention_states_reference(
    out_a: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_a: jax.Array,  # f32[num_tokens, num_q_heads]
    out_b: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_b: jax.Array,  # f32[num_tokens, num_q_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.merge_attention_states`."""
    lse = jnp.stack([lse_a, lse_b])  # f32[2, num_tokens, num_q_heads]
    out = jnp.stack([out_a, out_b]).astype(jnp.float32)
    is_empty = jnp.isneginf(lse)
    both_empty = jnp.all(is_empty, axis=0)
    weights = jax.nn.softmax(jnp.where(both_empty, 0.0, lse), axis=0)
    # An empty state may hold anything, and 0 * NaN is NaN.
    parts = jnp.where(is_empty[..., None], 0.0, weights[..., None] * out)
    merged_lse = jax.nn.logsumexp(jnp.where(both_empty, 0.0, lse), axis=0)
    return parts.sum(axis=0).astype(out_a.dtype), jnp.where(both_empty, -jnp.inf, merged_lse)
