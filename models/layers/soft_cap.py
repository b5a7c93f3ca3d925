"""Soft caps: a bound that logits approach smoothly."""

import jax
import jax.numpy as jnp


def soft_cap_logits(
    logits: jax.Array,  # f32[...]
    cap: float | None,
) -> jax.Array:  # f32[...], in (-cap, cap)
    """`cap * tanh(logits / cap)`; without a cap, the logits as they are.

    Source: arXiv:2408.00118, section 2.
    """
    if cap is None:
        return logits
    return cap * jnp.tanh(logits / cap)
