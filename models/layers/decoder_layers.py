"""Layers that several families share: attention and an MLP around one residual stream."""

import abc
from collections.abc import Callable
from dataclasses import replace

import jax
from flax import nnx

from models.cache.format import Pages
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


class AttentionMLPLayer(nnx.Module):
    """Attention over the normed residual stream. Derived classes add the outputs to the stream."""

    def __init__(
        self, *, attention: SelfAttention, mlp: MLP, norm: Callable[[], nnx.Module]
    ) -> None:
        """Makes the layer.

        Args:
            norm: Makes a norm over the hidden size; derived classes call it for further norms.
        """
        self.input_layernorm = norm()
        self.self_attn = attention
        self.mlp = mlp

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        attended, pages = self.self_attn(carry.hidden, pages, context, norm=self.input_layernorm)
        hidden = context.of_kept().by_token(self._add_parts, context.kept(carry.hidden), attended)
        return replace(carry, hidden=hidden), pages

    @abc.abstractmethod
    def _add_parts(
        self,
        hidden: jax.Array,  # f[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        """Returns the residual stream with the outputs of attention and of the MLP added."""


class PreNormLayer(AttentionMLPLayer):
    """Attention, then the MLP: each reads the normed residual stream and adds to it."""

    def __init__(
        self, *, attention: SelfAttention, mlp: MLP, norm: Callable[[], nnx.Module]
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.post_attention_layernorm = norm()

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        hidden = hidden + self.self_attn.project_out(attended, context)
        return hidden + self.mlp(self.post_attention_layernorm(hidden), context)


class SandwichNormLayer(AttentionMLPLayer):
    """Attention, then the MLP: each reads the normed residual stream and adds its normed output.

    Source: arXiv:2408.00118, section 2.
    """

    def __init__(
        self, *, attention: SelfAttention, mlp: MLP, norm: Callable[[], nnx.Module]
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        # Norms attention's output. In `PreNormLayer`, the norm of this name is for the MLP's input.
        self.post_attention_layernorm = norm()
        self.pre_feedforward_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        hidden = hidden + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        return hidden + self.post_feedforward_layernorm(out)


class ParallelLayer(AttentionMLPLayer):
    """Attention and the MLP each read the normed residual stream, and both add to it.

    Source: GPT-J, github.com/kingoflolz/mesh-transformer-jax.
    """

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        return hidden + out + self.mlp(self.input_layernorm(hidden), context)
