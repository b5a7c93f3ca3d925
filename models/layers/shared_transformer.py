"""Layers that share one transformer block. Each has its own recurrent mixer (Zamba)."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.linear import Linear
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class EmbeddedCarry(Carry):
    """The residual stream, and the embeddings of the tokens."""

    embedded: jax.Array  # f[num_tokens, hidden]


class WideAttention(Attention):
    """Attention whose input is wider than its output."""

    def __init__(self, config: AttentionConfig, *, out_features: int, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            config: Its `hidden_size` is the width of the input.
            out_features: Width of the output.
        """
        super().__init__(config, dtype=dtype)
        width = config.num_q_heads * config.value_head_dim
        self.o_proj = Linear(width, out_features, axes=("heads", None), dtype=dtype)


class SharedTransformer(nnx.Module):
    """Attention over the residual stream joined with the embeddings, and then an MLP.

    Nothing is added to the residual stream: the output goes to the mixer of the layer.
    """

    def __init__(
        self, *, attention: SelfAttention, mlp: MLP, norm: Callable[[int], nnx.Module], width: int
    ) -> None:
        """Makes the block.

        Args:
            norm: Makes a norm over the given number of features.
            width: The hidden size.
        """
        self.input_layernorm = norm(2 * width)
        self.self_attn = attention
        self.pre_ff_layernorm = norm(width)
        self.feed_forward = mlp

    def attend(
        self, carry: EmbeddedCarry, pages: Pages, context: LayerContext
    ) -> tuple[jax.Array, Pages]:
        """The input of `transform`, f[num_tokens, num_q_heads, head_dim], and the pages."""
        joined = jnp.concatenate([carry.hidden, carry.embedded], axis=1)
        return self.self_attn(joined, pages, context, norm=self.input_layernorm)

    def transform(
        self,
        attended: jax.Array,  # f[num_rows, num_q_heads, head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        out = self.self_attn.project_out(attended, context)
        return self.feed_forward(self.pre_ff_layernorm(out), context)


class RecurrentLayer(nnx.Module):
    """Adds the output of a recurrent mixer to the residual stream."""

    def __init__(self, *, mixer: SelfAttention, norm: nnx.Module) -> None:
        self.input_layernorm = norm
        self.mamba = mixer

    def __call__(
        self,
        carry: EmbeddedCarry,
        pages: Pages,
        context: LayerContext,
        added: jax.Array | None = None,  # f[num_tokens, hidden], added to the mixer's input alone
    ) -> tuple[EmbeddedCarry, Pages]:
        hidden = carry.hidden if added is None else carry.hidden + added
        mixed, pages = self.mamba(hidden, pages, context, norm=self.input_layernorm)

        def add(hidden: jax.Array, mixed: jax.Array, context: LayerContext) -> jax.Array:
            return hidden + self.mamba.project_out(mixed, context)

        hidden = context.of_kept().by_token(add, context.kept(carry.hidden), mixed)
        return replace(carry, hidden=hidden), pages


class SharedTransformerLayer(nnx.Module):
    """Adds the output of the shared block to the input of the layer's own mixer."""

    def __init__(
        self, *, shared: SharedTransformer, linear: Linear, recurrent: RecurrentLayer
    ) -> None:
        """Makes the layer.

        Args:
            linear: Projects the output of the shared block.
        """
        self.shared = shared
        self.linear = linear
        self.mamba_decoder = recurrent

    def __call__(
        self, carry: EmbeddedCarry, pages: Pages, context: LayerContext
    ) -> tuple[EmbeddedCarry, Pages]:
        # The mixer needs the output of the shared block for all tokens.
        whole = self.adapted(context.with_all_rows())
        attended, pages = self.shared.attend(carry, pages, whole)

        def transform(attended: jax.Array, context: LayerContext) -> jax.Array:
            return self.linear(self.shared.transform(attended, context), context)

        added = whole.by_token(transform, attended)
        return self.mamba_decoder(carry, pages, context, added)

    def adapted(self, context: LayerContext) -> LayerContext:
        """The context in which the shared block runs."""
        return context
