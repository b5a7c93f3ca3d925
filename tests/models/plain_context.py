"""`plain_context`: the context of layers that look at neither tokens nor caches."""

import jax
import numpy as np

from models import ForwardBatch, KernelSettings
from models.forward.layer_context import LayerContext


def plain_context(num_tokens: int = 1) -> LayerContext:
    """One request with that many tokens, and no groups of KV caches."""
    # `jnp.arange` would compile a program for each number.
    tokens = jax.device_put(np.arange(num_tokens, dtype=np.int32))
    batch = ForwardBatch(
        token_ids=tokens,
        positions=tokens,
        query_start_loc=jax.device_put(np.array([0, num_tokens], np.int32)),
        groups=(),
        logits_indices=tokens,
    )
    return LayerContext(batch=batch, kernels=KernelSettings(), slots=(), cos_sin={})
