"""`SelfAttention`: what a decoder layer needs of its attention."""

from collections.abc import Callable
from typing import Protocol

import jax

from models.cache.format import Pages
from models.forward.layer_context import LayerContext

Norm = Callable[[jax.Array], jax.Array]


class SelfAttention(Protocol):
    """Attention over the layer's cache. The class decides what the cache holds."""

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, ...]
        """Attends with `norm(hidden)`, without the output projection.

        Returns:
            The input of `project_out`, and the pages with the step's tokens.
        """

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, ...]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        """The output projection. It computes each token from its own row."""
