"""Beam's parts: gated attention, MLPs that round once, and residuals scaled by their number."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention, Norm
from models.layers.decoder_layers import SandwichNormLayer
from models.layers.experts import Experts
from models.layers.linear import Linear
from models.layers.mlp import GatedMLP, activate
from models.weight_rule import Source, WeightRule


class BeamAttention(Attention):
    """Attention whose output is multiplied by `sigmoid(gate_proj(x) + bias)`.

    The bias has one number for each head. In layers without positions, queries have a factor that
    grows with their position: `(1 + (position + 1) / 2048) ** 0.1`.

    Source: huggingface.co/reflection/Beam-1.0-501B-A23B.
    """

    def __init__(
        self, config: AttentionConfig, *, q_norm: nnx.Module, k_norm: nnx.Module, dtype: jnp.dtype
    ) -> None:
        super().__init__(config, q_norm=q_norm, k_norm=k_norm, dtype=dtype)
        width = config.num_q_heads * config.head_dim
        self.gate_proj = Linear(config.hidden_size, width, axes=(None, "heads"), dtype=dtype)
        self.bias = nnx.Param(jnp.zeros((config.num_q_heads,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.gate_bias", shape=(self.config.num_q_heads,))
        rule = WeightRule(sources=(source,), layout="vector", axes=("heads",))
        return super().weight_rules(name) | {"bias": rule}

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        def gated(hidden: jax.Array, attended: jax.Array, context: LayerContext) -> jax.Array:
            gate = self.gate_proj(norm(hidden), context).reshape(attended.shape)
            return attended * jax.nn.sigmoid(gate + self.bias[...][:, None])

        attended, pages = super().__call__(hidden, pages, context, norm=norm)
        return context.of_kept().by_token(gated, context.kept(hidden), attended), pages

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        q = super()._queries(normed, cos, sin, context)
        if self.config.has_positions:
            return q
        positions = context.of_rows(context.batch.positions).astype(jnp.float32)
        factors = jnp.exp(0.1 * jnp.log1p((positions + 1) / 2048))
        return (q.astype(jnp.float32) * factors[:, None, None]).astype(q.dtype)


class BeamMLP(GatedMLP):
    """A gated MLP that rounds the product of the activated gate and up, and not the factors."""

    def __call__(self, x: jax.Array, context: LayerContext) -> jax.Array:
        joined = _join(self.gate_proj(x, context), self.up_proj(x, context), self)
        return self.down_proj(joined, context)


class BeamExperts(Experts):
    """Experts that round as `BeamMLP` does."""

    def join(self, gate: jax.Array, up: jax.Array) -> jax.Array:  # f[places, intermediate]
        return _join(gate, up, self)


class BeamLayer(SandwichNormLayer):
    """A layer that keeps the variance of the residual stream.

    The sum of the stream and the n-th output is `stream * sqrt((n - 1) / n) + output / sqrt(n)`.
    The embedding is the first of the n parts.
    """

    def _add_parts(
        self, hidden: jax.Array, attended: jax.Array, context: LayerContext
    ) -> jax.Array:
        number = 2 * (context.layer_idx + 1)
        out = self.self_attn.project_out(attended, context)
        hidden = _add(hidden, self.post_attention_layernorm(out), number)
        out = self.mlp(self.pre_feedforward_layernorm(hidden), context)
        return _add(hidden, self.post_feedforward_layernorm(out), number + 1)


def _join(gate: jax.Array, up: jax.Array, mlp: BeamMLP | BeamExperts) -> jax.Array:
    activated = activate(gate.astype(jnp.float32), mlp.activation)
    return (activated * up.astype(jnp.float32)).astype(gate.dtype)


def _add(hidden: jax.Array, out: jax.Array, number: int | jax.Array) -> jax.Array:
    number = jnp.asarray(number, jnp.float32)
    # Both products are rounded before they are added, as in transformers.
    scaled = (out.astype(jnp.float32) * jax.lax.rsqrt(number)).astype(hidden.dtype)
    kept = hidden.astype(jnp.float32) * jnp.sqrt((number - 1) / number)
    return scaled + kept.astype(hidden.dtype)
