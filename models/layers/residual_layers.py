"""Further layers of attention and an MLP around one residual stream, as in `decoder_layers`."""

from collections.abc import Callable

import jax
from flax import nnx

from models.cache.format import Pages
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.decoder_layers import AttentionMLPLayer, PreNormLayer, SandwichNormLayer
from models.layers.mlp import MLP
from models.layers.self_attention import SelfAttention


class PostNormLayer(AttentionMLPLayer):
    """Attention, then the MLP: each reads the residual stream and adds its normed output.

    Source: arXiv:2501.00656, section 3.2 (OLMo 2).
    """

    def __init__(
        self, *, attention: SelfAttention, mlp: MLP, norm: Callable[[], nnx.Module]
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        del self.input_layernorm
        self.post_attention_layernorm = norm()
        self.post_feedforward_layernorm = norm()

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        attended, pages = self.self_attn(carry.hidden, pages, context, norm=lambda hidden: hidden)
        hidden = context.of_kept().by_token(self._add_parts, context.kept(carry.hidden), attended)
        return Carry(hidden=hidden), pages

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        hidden = hidden + self.post_attention_layernorm(out)
        return hidden + self.post_feedforward_layernorm(self.mlp(hidden, context))


class TwoNormParallelLayer(PreNormLayer):
    """Attention and the MLP read the residual stream through norms of their own, and add to it.

    Source: arXiv:2204.06745, section 2.1 (GPT-NeoX).
    """

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        return hidden + out + self.mlp(self.post_attention_layernorm(hidden), context)


class ScaledPreNormLayer(PreNormLayer):
    """`PreNormLayer` that multiplies both outputs by a factor before it adds them (Granite)."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        residual_scale: float,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.residual_scale = residual_scale

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        hidden = hidden + self.self_attn.project_out(attended, context) * self.residual_scale
        out = self.mlp(self.post_attention_layernorm(hidden), context)
        return hidden + out * self.residual_scale


class ScaledSandwichNormLayer(SandwichNormLayer):
    """`SandwichNormLayer` that multiplies both normed outputs by a factor (HyperCLOVA X)."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        residual_scale: float,
    ) -> None:
        super().__init__(attention=attention, mlp=mlp, norm=norm)
        self.residual_scale = residual_scale

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.self_attn.project_out(attended, context)
        hidden = hidden + self.post_attention_layernorm(out) * self.residual_scale
        out = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        return hidden + self.post_feedforward_layernorm(out) * self.residual_scale
