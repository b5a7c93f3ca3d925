"""Layers of the normalized transformer: all hidden states have length 1.

Source: nGPT, arXiv:2410.01131.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import Activation
from models.forward.layer_context import LayerContext
from models.layers.decoder_layers import AttentionMLPLayer
from models.layers.gated_attention import GatedAttention
from models.layers.mlp import GatedMLP
from models.weight_rule import Source, SplitAxis, WeightRule
from pallas_kernels.row_reductions import platform_sum_of_rows

_EPS = 1e-6


class UnitNorm(nnx.Module):
    """`x / sqrt(sum(x^2) + eps)`, computed in float32: a norm without parameters."""

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        x_f32 = x.astype(jnp.float32)
        sum_of_squares = platform_sum_of_rows(x_f32 * x_f32)
        return (x_f32 * jax.lax.rsqrt(sum_of_squares[..., None] + _EPS)).astype(x.dtype)


class UnitFactors(nnx.Module):
    """A factor for each feature, stored as a multiple of `unit` (section 2.5)."""

    def __init__(
        self,
        num_features: int,
        *,
        unit: float,
        axis: SplitAxis | None = None,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the factors, to be filled in.

        Args:
            axis: As an entry of `WeightRule.axes`.
        """
        self.stored = nnx.Param(jnp.zeros((num_features,), dtype))
        self.unit = unit
        self.axis = axis

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=name, shape=self.stored.get_value().shape)
        return {"stored": WeightRule(sources=(source,), layout="vector", axes=(self.axis,))}

    def factors(self, dtype: jnp.dtype) -> jax.Array:  # f[num_features]
        """The factors, computed in this dtype."""
        return self.stored[...].astype(dtype) * self.unit

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return x * self.factors(x.dtype)


class SquaredSigmoidGate(UnitFactors):
    """`sigmoid(x * factors^2)`."""

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        return jax.nn.sigmoid(x * jnp.square(self.factors(x.dtype)))


class UnitSphereAttention(GatedAttention):
    """Gated attention whose queries, keys and joined heads have length 1.

    After their rotation, queries are multiplied by the squares of `sqk`.
    """

    def __init__(self, config: AttentionConfig, *, unit: float, dtype: jnp.dtype) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            unit: The value that stored factors have before training.
        """
        width = config.num_q_heads * config.head_dim
        split = {"axis": "heads", "dtype": dtype}
        gate = SquaredSigmoidGate(width, unit=config.hidden_size**0.25 / unit, **split)
        super().__init__(config, gate=gate, q_norm=UnitNorm(), k_norm=UnitNorm(), dtype=dtype)
        self.sqk = UnitFactors(width, unit=config.head_dim**0.5 / unit, **split)
        self.sub_norm = UnitNorm()

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        q = super()._queries(normed, cos, sin, context)
        return q * jnp.square(self.sqk.factors(q.dtype)).reshape(q.shape[1:])

    def project_out(self, attended: jax.Array, context: LayerContext) -> jax.Array:
        joined = attended.reshape(attended.shape[0], -1)
        return self.o_proj(self.sub_norm(joined), context)


class UnitSphereMLP(GatedMLP):
    """A gated MLP whose inner features have length 1, and factors before the activation."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: Activation,
        use_bias: bool = False,
        dtype: jnp.dtype,
    ) -> None:
        sizes = hidden_size, intermediate_size
        super().__init__(*sizes, activation=activation, use_bias=use_bias, dtype=dtype)
        split = {"unit": hidden_size**0.5, "axis": "inner", "dtype": dtype}
        self.suv_gate = UnitFactors(intermediate_size, **split)
        self.suv_up = UnitFactors(intermediate_size, **split)
        self.sub_norm = UnitNorm()

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        gate = self._activated(self.suv_gate(self.gate_proj(x, context)))
        inner = gate * self.suv_up(self.up_proj(x, context))
        return self.down_proj(self.sub_norm(inner), context)


class UnitSphereLayer(AttentionMLPLayer):
    """Attention, then the MLP: each moves the hidden state towards its normed output.

    Source: section 2.2. The rates of `lambda_1` and `lambda_2` are absolute values.
    """

    def __init__(
        self,
        *,
        attention: UnitSphereAttention,
        mlp: UnitSphereMLP,
        rate_unit: float,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            rate_unit: `UnitFactors.unit` of the rates.
        """
        super().__init__(attention=attention, mlp=mlp, norm=UnitNorm)
        hidden_size = attention.config.hidden_size
        self.lambda_1 = UnitFactors(hidden_size, unit=rate_unit, dtype=dtype)
        self.lambda_2 = UnitFactors(hidden_size, unit=rate_unit, dtype=dtype)

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        norm = self.input_layernorm
        hidden = norm(hidden)
        out = norm(self.self_attn.project_out(attended, context))
        hidden = norm(hidden + self._rates(self.lambda_1, hidden) * (out - hidden))
        out = norm(self.mlp(hidden, context))
        return hidden + self._rates(self.lambda_2, hidden) * (out - hidden)

    def _rates(self, factors: UnitFactors, hidden: jax.Array) -> jax.Array:
        return jnp.abs(factors.factors(hidden.dtype))
