"""`DraftHead`: the interface of drafters that continue from the hidden states of their target."""

import abc
from collections.abc import Callable, Mapping, Sequence

import jax
from flax import nnx

from models.cache.format import Pages
from models.forward.layer_context import LayerContext, LayerPlaces
from models.weight_rule import WeightRule


class DraftHead(nnx.Module, abc.ABC):
    """A few layers that predict tokens from hidden states of the target.

    The row of position p has the target's hidden state of position p and the embedding of the
    token at position p + 1. It predicts the token at position p + 2. The layers cache keys and
    values at position p. To go on, the head reads its own hidden states in place of the target's.
    """

    def embed(
        self,
        token_ids: jax.Array,  # i32[num_tokens]
        target_embed: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # f[num_tokens, hidden]
        """Embeds tokens, by default with the target's embedding."""
        return target_embed(token_ids)

    def combine(
        self,
        hidden: jax.Array,  # f[num_tokens, width], of the target; several layers side by side
    ) -> jax.Array:  # f[num_tokens, hidden]
        """Returns what the layers read in place of the target's hidden states."""
        return hidden

    @abc.abstractmethod
    def run(
        self,
        embedded: jax.Array,  # f[num_tokens, hidden], of the next tokens
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        places: Sequence[LayerPlaces],
    ) -> tuple[jax.Array, Pages]:  # f[num_tokens, hidden]
        """Runs the layers, and returns their hidden states and the pages."""

    @abc.abstractmethod
    def choose(
        self,
        hidden: jax.Array,  # f[num_rows, hidden], from `run`
        target_logits: Callable[[jax.Array], jax.Array],
        argmax: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:  # i32[num_rows]
        """Returns the most likely token of each row, as the target numbers tokens.

        Args:
            target_logits: The target's vocabulary head.
            argmax: Returns the index i32[num_rows] of the largest of f32[num_rows, num_ids].
        """

    @abc.abstractmethod
    def weight_rules(self) -> Mapping[str, WeightRule]:
        """As `Decoder.weight_rules`."""

    @abc.abstractmethod
    def ignores_weight(self, name: str) -> bool:
        """As `Decoder.ignores_weight`."""

    def name_weight(self, name: str) -> str:
        """As `Decoder.name_weight`."""
        return name
