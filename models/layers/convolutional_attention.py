"""`ConvolutionalAttention`: convolved queries and keys, and values from two tokens."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import CacheFormat, Pages
from models.cache.state_format import StateFormat
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext, LayerState
from models.layers.attention import AttentionBase, split_heads
from models.layers.head_convolution import HeadConvolution, last_inputs
from models.layers.linear import Linear
from models.layers.rotary import apply_rotary
from models.layers.self_attention import Norm
from models.layers.short_convolution import ShortConvolution
from models.weight_rule import Source, WeightRule
from pallas_kernels.row_reductions import platform_sum_of_rows

# The name of the layer's cache of states.
CONVOLUTIONS = "convolutions"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvolutionalAttentionConfig(AttentionConfig):
    """The config of a `ConvolutionalAttention`.

    Args:
        kernel_sizes: Of the convolution of each channel, and of the one within heads.
    """

    kernel_sizes: tuple[int, int]

    @property
    def num_channels(self) -> int:
        """Width of all queries and keys."""
        return (self.num_q_heads + self.num_kv_heads) * self.head_dim

    @property
    def num_late(self) -> int:
        """Width of the part of a token's values that is projected from the token before it."""
        return self.num_kv_heads * self.head_dim // 2

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        """See `AttentionConfig.formats`. The state has the last inputs of each convolution, and the
        late values of the last token.
        """
        windows = [(size - 1, self.num_channels) for size in self.kernel_sizes]
        shapes = (*windows, (1, self.num_late))
        states = StateFormat(shapes=shapes, num_windows=len(shapes))
        return AttentionConfig.formats(self, kv_dtype) | {CONVOLUTIONS: states}


class ConvolutionalAttention(AttentionBase):
    """Attention with queries and keys that go through two convolutions, and with delayed values.

    Queries and keys are joined. The first convolution is within each channel, and the second one
    within each head. Each query head of the result adds the mean of itself and its key head, both
    from before the convolutions. Each key head adds the mean of what its query heads add. Then each
    head is scaled to a fixed length, and a key head is multiplied by a trained factor.

    The second half of a token's values is projected from the token before it.

    Source: Compressed Convolutional Attention, arXiv:2510.04476.
    """

    def __init__(self, config: ConvolutionalAttentionConfig, *, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in."""
        super().__init__(config, q_norm=None, rotate=apply_rotary, dtype=dtype)
        linear = functools.partial(
            Linear, config.hidden_size, use_bias=config.qkv_bias, dtype=dtype
        )
        self.k_proj = linear(config.num_kv_heads * config.head_dim, axes=(None, "kv_heads"))
        self.v_proj_current = linear(config.num_late)
        self.v_proj_delayed = linear(config.num_late)
        first_size, second_size = config.kernel_sizes
        self.conv_qk_depthwise = ShortConvolution(
            config.num_channels, first_size, use_bias=True, has_silu=False, dtype=dtype
        )
        self.conv_qk_grouped = HeadConvolution(
            config.num_q_heads + config.num_kv_heads, config.head_dim, second_size, dtype=dtype
        )
        self.scale = nnx.Param(jnp.ones((config.num_kv_heads,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.qk_norm.temp", shape=(self.config.num_kv_heads,))
        return {"scale": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        def project(hidden: jax.Array, context: LayerContext) -> tuple[jax.Array, ...]:
            normed = norm(hidden)
            linears = (self.q_proj, self.k_proj, self.v_proj_current, self.v_proj_delayed)
            # The state is whole on each device of a mesh.
            return tuple(
                context.kernels.split_last(linear(normed, context), None) for linear in linears
            )

        q, k, early, late = context.by_token(project, hidden)
        state = context.state(CONVOLUTIONS)
        windows = self._windows(pages, state, context)
        mixed, first = self.conv_qk_depthwise(
            jnp.concatenate([q, k], axis=1), windows[0], state, context
        )
        inputs, second = last_inputs(mixed.astype(q.dtype), windows[1], state, context)
        late, last = last_inputs(late, windows[2], state, context)
        pages = context.write_state(state, pages, (first, second, last))
        cos_sin = context.cos_sin[self.config.rotary]
        q, k = context.by_token(self._queries_and_keys, q, k, inputs, *cos_sin)
        v = split_heads(jnp.concatenate([early, late[:, 0]], axis=1), self.config.head_dim)
        return self.attend(context.kept(q), (k, v), pages, context)

    def _windows(
        self, pages: Pages, state: LayerState, context: LayerContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The state before the step. A new request starts as if after tokens of zeros.

        For such tokens, the first convolution and the projection of the late values give their
        biases. The inputs of the first convolution are zeros, even if their projections have a
        bias. Both are as in transformers.
        """
        first, second, late = context.read_state(state, pages)

        def from_bias(window: jax.Array, bias: nnx.Param | None) -> jax.Array:
            if bias is None:
                return window
            starts = state.starts_from_zero[:, None, None]
            return jnp.where(starts, bias[...].astype(window.dtype), window)

        return (
            first,
            from_bias(second, self.conv_qk_depthwise.bias),
            from_bias(late, self.v_proj_delayed.bias),
        )

    def _queries_and_keys(
        self,
        q: jax.Array,  # f[num_rows, num_q_heads * head_dim], projected
        k: jax.Array,  # f[num_rows, num_kv_heads * head_dim], projected
        inputs: jax.Array,  # f[num_rows, kernel_size, num_channels], of the second convolution
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:  # f[num_rows, num_q_heads or num_kv_heads, head_dim]
        config = self.config
        q, k = split_heads(q, config.head_dim), split_heads(k, config.head_dim)
        queries_per_key = config.num_q_heads // config.num_kv_heads
        q = (q + jnp.repeat(k, queries_per_key, axis=1)) * 0.5
        k = q.reshape(*k.shape[:2], queries_per_key, config.head_dim).mean(axis=2)
        convolved = self.conv_qk_grouped(inputs, context)
        q = _with_length(q + convolved[:, : config.num_q_heads])
        k = _with_length(k + convolved[:, config.num_q_heads :]) * self.scale[...][:, None]
        return self.rotate(q, cos, sin), self.rotate(k, cos, sin)


def _with_length(
    heads: jax.Array,  # f[num_rows, num_heads, head_dim]
) -> jax.Array:  # f[num_rows, num_heads, head_dim]
    """Scales each head to a length of `sqrt(head_dim)`."""
    x = heads.astype(jnp.float32)
    length = jnp.sqrt(platform_sum_of_rows(x * x))[..., None]
    smallest = float(jnp.finfo(heads.dtype).eps)
    return (x * (x.shape[-1] ** 0.5 / jnp.maximum(length, smallest))).astype(heads.dtype)
