"""`plain_context`: the context of layers that look at neither tokens nor caches."""

import jax.numpy as jnp

from models import ForwardBatch, KernelSettings
from models.forward.layer_context import LayerContext


def plain_context(num_tokens: int = 1) -> LayerContext:
    """One request with that many tokens, and no groups of KV caches."""
    tokens = jnp.arange(num_tokens, dtype=jnp.int32)
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        query_start_loc=jnp.asarray([0, num_tokens], jnp.int32),
        groups=(),
        logits_indices=tokens,
    )
    return LayerContext(batch=batch, kernels=KernelSettings(), slots=(), cos_sin={})
