"""`ConvolvedLayer`: keys, values, and the outputs of both parts of a layer are convolved."""

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
from flax import nnx

from models.cache import rules
from models.cache.format import Pages
from models.cache.state_format import StateFormat
from models.config.relative_attention_config import RelativeAttentionConfig
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.mlp import MLP
from models.layers.relative_attention import RelativeAttention
from models.layers.residual_convolution import ResidualConvolution

# The name of the layer's cache of windows.
CONVOLUTIONS = "convolutions"


def format_of_windows(attention: RelativeAttentionConfig, kernel_size: int) -> StateFormat:
    """The windows of a layer: of keys, of values, of attention's output, and of the MLP's."""
    kv_width = attention.num_kv_heads * attention.head_dim
    widths = (kv_width, kv_width, attention.hidden_size, attention.hidden_size)
    return StateFormat(
        shapes=tuple((kernel_size - 1, width) for width in widths), num_windows=len(widths)
    )


class ConvolvedLayer(nnx.Module):
    """Attention, then the MLP: each adds its convolved output to the residual stream.

    The convolutions need the outputs of all tokens, so the last layer drops rows only after them.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        kernel_size: int,
        attention: RelativeAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
    ) -> None:
        """Makes the layer.

        Args:
            norm: Makes a norm over the hidden size.
        """
        self.input_layernorm = norm()
        self.self_attn = attention
        self.attn_sconv = ResidualConvolution(hidden_size, kernel_size)
        self.post_attention_layernorm = norm()
        self.mlp = mlp
        self.mlp_sconv = ResidualConvolution(hidden_size, kernel_size)

    def __call__(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        of_all = context.with_all_rows()
        state = context.state(CONVOLUTIONS)
        k_window, v_window, attn_window, mlp_window = windows = context.read_state(state, pages)
        # Keys and values are written after all windows have been read.
        hidden = functools.reduce(rules.after, windows, carry.hidden)
        attended, kv_windows, pages = self.self_attn(
            *(hidden, (k_window, v_window), state, pages, of_all), norm=self.input_layernorm
        )
        out = of_all.by_token(self.self_attn.project_out, attended)
        out, attn_window = self.attn_sconv(out, attn_window, state, of_all)
        hidden, out = of_all.by_token(self._mlp_of_sum, hidden, out)
        out, mlp_window = self.mlp_sconv(out, mlp_window, state, of_all)
        pages = context.write_state(state, pages, (*kv_windows, attn_window, mlp_window))
        return replace(carry, hidden=context.kept(hidden + out)), pages

    def _mlp_of_sum(
        self, hidden: jax.Array, out: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:  # f[num_rows, hidden], both
        """The residual stream after attention, and the MLP's output for it."""
        hidden = hidden + out
        return hidden, self.mlp(self.post_attention_layernorm(hidden), context)
