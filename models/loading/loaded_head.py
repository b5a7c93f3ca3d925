"""`LoadedHead`: a `DraftHead` split into static structure and a flat tuple of arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax

from models.cache.format import Pages
from models.forward.forward_batch import ForwardBatch
from models.forward.layer_context import make_context
from models.loading.loaded_module import LoadedModule


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead(LoadedModule):
    """A draft head ready to run after the steps of its target. See `DraftHead`.

    Args:
        taps: The layers of the target whose hidden states the head reads, as in `Wants`. Empty: it
            reads those after the last norm.
    """

    reads_hidden: ClassVar[bool] = True
    has_states: ClassVar[bool] = False

    taps: tuple[int, ...] = ()

    def embed(
        self,
        params: tuple[jax.Array, ...],
        token_ids: jax.Array,  # i32[num_tokens]
        target_embed: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # f[num_tokens, hidden]
        """See `DraftHead.embed`."""
        return self._merge(params).embed(token_ids, target_embed)

    def combine(
        self,
        params: tuple[jax.Array, ...],
        hidden: jax.Array,  # f[num_tokens, width]
    ) -> jax.Array:  # f[num_tokens, hidden]
        """See `DraftHead.combine`."""
        return self._merge(params).combine(hidden)

    def run(
        self,
        params: tuple[jax.Array, ...],
        pages: Pages,
        batch: ForwardBatch,
        *,
        embedded: jax.Array,  # f[num_tokens, hidden]
        hidden: jax.Array,  # f[num_tokens, hidden]
    ) -> tuple[jax.Array, Pages]:  # f[num_tokens, hidden]
        """Runs the layers over tokens, and returns the hidden states of all of them.

        Raises:
            ModelError: As `LoadedModel.forward`.
        """
        self._check_places(batch, pages)
        rotaries = dict.fromkeys(layer.rotary for layer in self.config.attention_layers)
        context = make_context(batch, pages, self.kernels, rotaries)
        return self._merge(params).run(embedded, hidden, pages, context, self.places)

    def choose(
        self,
        params: tuple[jax.Array, ...],
        hidden: jax.Array,  # f[num_rows, hidden]
        target_logits: Callable[[jax.Array], jax.Array],
        argmax: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # i32[num_rows]
        """Returns the most likely token of each row. See `DraftHead.choose`."""
        return self._merge(params).choose(hidden, target_logits, argmax)
