"""Parts of Muse Spark's layers: normed heads, gates of the residual stream, and one more norm."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.gated_attention import GatedAttention
from models.layers.mlp import MLP
from models.layers.output_norm_layer import OutputNormLayer
from models.layers.rms_norm import OffsetRMSNorm, UnscaledRMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import Source, WeightRule

# The smallest share of the stream in a sum, before the square root.
_MIN_SHARE = 1e-3


class InputScaledRMSNorm(OffsetRMSNorm):
    """`y / sqrt(mean(y^2) + eps)`, where y is `x * (1 + offset)`, rounded to x's dtype."""

    def __call__(
        self,
        x: jax.Array,  # f[..., num_features]
    ) -> jax.Array:  # f[..., num_features]
        scale = 1.0 + self.offset[...].astype(jnp.float32)
        return UnscaledRMSNorm(eps=self.eps)((x.astype(jnp.float32) * scale).astype(x.dtype))


class NormedGatedAttention(GatedAttention):
    """`GatedAttention` that norms the output of each head before it is multiplied by the gate."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        gate: Callable[[jax.Array], jax.Array],
        q_norm: nnx.Module,
        k_norm: nnx.Module,
        o_norm: nnx.Module,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer; the other arguments are as in `GatedAttention`.

        Args:
            o_norm: Norm of each head's output.
        """
        super().__init__(config, gate=gate, q_norm=q_norm, k_norm=k_norm, dtype=dtype)
        self.o_norm = o_norm

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        new_kv: tuple[jax.Array, jax.Array] | None,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, v_head_dim]
        attended, pages = super().attend(q, new_kv, pages, context)
        return self.o_norm(attended), pages


class ResidualGate(nnx.Module):
    """The weighted sum of the residual stream and an output, with trained weights per feature.

    With `b = sigmoid(gate / temperature)`, the sum is `sqrt(1 - b^2) * stream + b * output`. In it,
    1 - b^2 is at least 0.001.
    """

    def __init__(self, num_features: int, *, temperature: float) -> None:
        # As in transformers, float32 whatever dtype the other parameters have.
        self.gate = nnx.Param(jnp.zeros((num_features,), jnp.float32))
        self.temperature = temperature

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.gate", shape=self.gate.get_value().shape)
        return {"gate": WeightRule(sources=(source,), layout="vector", axes=(None,))}

    def __call__(
        self,
        stream: jax.Array,  # f[num_rows, num_features]
        out: jax.Array,  # f[num_rows, num_features]
    ) -> jax.Array:  # f[num_rows, num_features]
        logits = self.gate[...] / self.temperature
        share = jax.nn.sigmoid(logits)
        kept = jnp.sqrt(jnp.maximum(jax.nn.sigmoid(-logits) * (1.0 + share), _MIN_SHARE))
        total = kept * stream.astype(jnp.float32) + share * out.astype(jnp.float32)
        return total.astype(stream.dtype)


class GatedResidualLayer(OutputNormLayer):
    """`OutputNormLayer` that adds the normed outputs to the stream with a `ResidualGate` each."""

    def __init__(
        self,
        *,
        attention: SelfAttention,
        mlp: MLP,
        norm: Callable[[], nnx.Module],
        attention_out_norm: Callable[[], nnx.Module],
        mlp_out_norm: Callable[[], nnx.Module],
        residual_gate: Callable[[], ResidualGate],
    ) -> None:
        """Makes the layer; the other arguments are as in `OutputNormLayer`.

        Args:
            residual_gate: Makes the gate of an output.
        """
        super().__init__(
            attention=attention,
            mlp=mlp,
            norm=norm,
            attention_out_norm=attention_out_norm,
            mlp_out_norm=mlp_out_norm,
        )
        self.post_attention_residual_gate = residual_gate()
        self.post_feedforward_residual_gate = residual_gate()

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        out = self.post_attention_layernorm(self.self_attn.project_out(attended, context))
        hidden = self.post_attention_residual_gate(hidden, out)
        out = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        return self.post_feedforward_residual_gate(hidden, self.post_feedforward_layernorm(out))
