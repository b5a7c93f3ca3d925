"""`DynamicMaskAttention`: attention whose logits have a bias that is computed from the values."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attend import attend
from models.layers.attention import Attention
from models.layers.linear import Linear
from models.layers.rotary import Rotate, apply_rotary
from models.weight_rule import Source, WeightRule

# Dimensions that are added to each head. The bias is stored as the sum of two numbers.
_NUM_PARTS = 2


def with_key_bias(config: AttentionConfig) -> AttentionConfig:
    """The config of `DynamicMaskAttention`: keys and queries are wider, and values are not."""
    return dataclasses.replace(
        config,
        head_dim=config.head_dim + _NUM_PARTS,
        v_head_dim=config.value_head_dim,
        rotary_dim=config.head_dim if config.rotary_dim is None else config.rotary_dim,
    )


class DynamicMaskAttention(Attention):
    """Attention with a bias for each key and KV head: `exp(rate * softplus(dt_proj(values)))`.

    `dt_proj` reads the values of all heads of the key's token. The bias is added to the logits of
    all queries of the KV head. It is therefore stored with the key, in dimensions in which each
    query has a 1. Caches and kernels need not know of it. Dynamic masks also drop the keys with the
    smallest biases from long sequences. This class does not, so the model must limit the length.

    Source: arXiv:2412.11834.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            config: From `with_key_bias`. Its `head_dim` is that of stored keys.
            q_norm: As in `Attention`; so are `k_norm` and `rotate`.
        """
        projected = dataclasses.replace(config, head_dim=config.head_dim - _NUM_PARTS)
        super().__init__(projected, q_norm=q_norm, k_norm=k_norm, rotate=rotate, dtype=dtype)
        self.stored_config = config
        self.dt_proj = Linear(
            config.num_kv_heads * config.value_head_dim,
            config.num_kv_heads,
            axes=("heads", None),
            use_bias=config.qkv_bias,
            dtype=dtype,
        )
        self.rate = nnx.Param(jnp.zeros((config.num_kv_heads,), dtype))

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        source = Source(name=f"{name}.A", shape=(self.config.num_kv_heads,))
        rule = WeightRule(sources=(source,), layout="vector", axes=(None,))
        return {**super().weight_rules(name), "rate": rule}

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, stored head_dim]
        new_kv: tuple[jax.Array, jax.Array] | None,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, v_head_dim]
        """See `AttentionBase.attend`."""
        sinks = None if self.sinks is None else self.sinks[...]
        return attend(self.stored_config, q, new_kv, pages, context, sinks=sinks)

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_rows, num_q_heads, stored head_dim]
        q = super()._queries(normed, cos, sin, context)
        return jnp.pad(q, ((0, 0), (0, 0), (0, _NUM_PARTS)), constant_values=1)

    def _keys_and_values(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = super()._keys_and_values(normed, cos, sin, context)
        dt = self.dt_proj(v.reshape(v.shape[0], -1), context).astype(jnp.float32)
        bias = jnp.exp(self.rate[...].astype(jnp.float32) * jax.nn.softplus(dt))
        # Kernels multiply by the scale. The first part has the 8 bits of bfloat16 in every dtype,
        # which 16-bit caches keep, and the second part has the next 8 bits or more.
        product = bias / self.config.scale
        high = jax.lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
        parts = jnp.stack([high, product - high], axis=-1).astype(k.dtype)
        return jnp.concatenate([k, parts], axis=-1), v
