"""Layers of one part: a mixer alone (`MixerLayer`), or an MLP alone (`MLPLayer`)."""

from collections.abc import Callable
from dataclasses import replace

import jax
from flax import nnx

from models.cache.format import Pages
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


class MixerLayer(nnx.Module):
    """Adds the output of attention, or of a recurrent mixer, to the residual stream."""

    def __init__(self, *, mixer: SelfAttention, norm: Callable[[], nnx.Module]) -> None:
        self.norm = norm()
        self.mixer = mixer

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        mixed, pages = self.mixer(carry.hidden, pages, context, norm=self.norm)

        def add(hidden: jax.Array, mixed: jax.Array, context: LayerContext) -> jax.Array:
            return hidden + self.mixer.project_out(mixed, context)

        hidden = context.of_kept().by_token(add, context.kept(carry.hidden), mixed)
        return replace(carry, hidden=hidden), pages


class MLPLayer(nnx.Module):
    """Adds the output of an MLP, or of experts, to the residual stream. It has no cache."""

    def __init__(self, *, mixer: MLP, norm: Callable[[], nnx.Module]) -> None:
        self.norm = norm()
        self.mixer = mixer

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        def add(hidden: jax.Array, context: LayerContext) -> jax.Array:
            return hidden + self.mixer(self.norm(hidden), context)

        hidden = context.of_kept().by_token(add, context.kept(carry.hidden))
        return replace(carry, hidden=hidden), pages
