"""Plain-JAX body of `merge_attention_states`: one pass, which XLA fuses into one loop."""

import jax
import jax.numpy as jnp


def merge_attention_states_xla(
    out_a: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_a: jax.Array,  # f32[num_tokens, num_q_heads]
    out_b: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    lse_b: jax.Array,  # f32[num_tokens, num_q_heads]
) -> tuple[jax.Array, jax.Array]:
    """See `api.merge_attention_states`."""
    largest = jnp.maximum(lse_a, lse_b)
    both_empty = jnp.isneginf(largest)
    # -inf minus -inf is NaN. -inf minus 0 is -inf, which has the weight 0.
    largest = jnp.where(both_empty, 0.0, largest)
    weight_a, weight_b = jnp.exp(lse_a - largest), jnp.exp(lse_b - largest)
    # At least 1, because the state with the larger lse has the weight 1.
    total = jnp.where(both_empty, 1.0, weight_a + weight_b)
    out = _weighted(out_a, weight_a / total) + _weighted(out_b, weight_b / total)
    lse = jnp.where(both_empty, -jnp.inf, largest + jnp.log(total))
    return out.astype(out_a.dtype), lse


def _weighted(
    out: jax.Array,  # f[num_tokens, num_q_heads, v_head_dim]
    weight: jax.Array,  # f32[num_tokens, num_q_heads]
) -> jax.Array:  # f32[num_tokens, num_q_heads, v_head_dim]
    weight = weight[..., None]
    # A state without keys may hold anything, and 0 * NaN is NaN.
    return jnp.where(weight > 0, weight * out.astype(jnp.float32), 0.0)
