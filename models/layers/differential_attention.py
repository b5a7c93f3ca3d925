"""`DifferentialAttention`: each head is the difference of two softmaxes over the same values."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.errors import ModelConfigError
from models.forward.layer_context import LayerContext
from models.layers.attend import attend
from models.layers.attention import Attention
from models.layers.rms_norm import UnscaledRMSNorm
from models.layers.rotary import Rotate, apply_rotary
from models.weight_rule import Source, WeightRule

# Their products are the logarithms of the factors of the first and the second softmax.
_LAMBDAS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def with_paired_heads(config: AttentionConfig) -> AttentionConfig:
    """The config of `DifferentialAttention`: half as many KV heads, of twice the width.

    Raises:
        ModelConfigError: The number of KV heads is odd.
    """
    if config.num_kv_heads % 2:
        raise ModelConfigError(
            f"config.json: num_key_value_heads={config.num_kv_heads} is odd; expected an even "
            "number, because differential attention subtracts one half of the heads from the other."
        )
    return dataclasses.replace(
        config,
        num_kv_heads=config.num_kv_heads // 2,
        head_dim=2 * config.head_dim,
        v_head_dim=2 * config.value_head_dim,
        rotary_dim=config.head_dim if config.rotary_dim is None else config.rotary_dim,
    )


class DifferentialAttention(Attention):
    """Attention whose first half of query heads loses `factor` times the second half.

    Query head i of the first half and head i of the second half read the same values, of both KV
    heads. The difference is normed and multiplied by `1 - start`. `start` grows with the layer's
    number, and is a part of `factor`.

    The cache stores KV head j of both halves as one head of twice the width. A query is zero in
    the half of the width that has the other key. Caches and kernels need not know of the pairs,
    and no value is stored twice.

    Source: arXiv:2410.05258, section 2.1.
    """

    def __init__(
        self,
        config: AttentionConfig,
        *,
        eps: float,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            config: From `with_paired_heads`. It describes the heads in the cache.
            eps: Of the norm of the differences.
            rotate: As in `Attention`.
        """
        projected = dataclasses.replace(
            config,
            num_kv_heads=2 * config.num_kv_heads,
            head_dim=config.head_dim // 2,
            v_head_dim=config.value_head_dim // 2,
        )
        super().__init__(projected, rotate=rotate, dtype=dtype)
        self.stored_config = config
        for name in _LAMBDAS:
            setattr(self, name, nnx.Param(jnp.zeros((projected.head_dim,), dtype)))
        self.norm = UnscaledRMSNorm(eps=eps)

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        rules = super().weight_rules(name)
        for own in _LAMBDAS:
            source = Source(name=f"{name}.{own}", shape=(self.config.head_dim,))
            rules[own] = WeightRule(sources=(source,), layout="vector", axes=(None,))
        return rules

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, stored head_dim]
        new_kv: tuple[jax.Array, jax.Array] | None,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, stored v_head_dim]
        """See `AttentionBase.attend`. Heads have the order of the stored KV heads."""
        return attend(self.stored_config, q, new_kv, pages, context)

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, stored v_head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        halves = attended.reshape(
            attended.shape[0], self.stored_config.num_kv_heads, 2, -1, attended.shape[-1]
        )
        start = 0.8 - 0.6 * jnp.exp(-0.3 * jnp.asarray(context.layer_idx, jnp.float32))
        factor = self._factor(start).astype(attended.dtype)
        normed = self.norm(halves[:, :, 0] - factor * halves[:, :, 1])
        heads = (normed.astype(jnp.float32) * (1 - start)).astype(attended.dtype)
        return super().project_out(heads, context)

    def _factor(
        self,
        start: jax.Array,  # f32[]
    ) -> jax.Array:  # f32[]
        first = jnp.exp(_sum_of_products(self.lambda_q1[...], self.lambda_k1[...]))
        second = jnp.exp(_sum_of_products(self.lambda_q2[...], self.lambda_k2[...]))
        dtype = self.lambda_q1[...].dtype
        return (first.astype(dtype) - second.astype(dtype)).astype(jnp.float32) + start

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:  # f[num_rows, num_q_heads, stored head_dim]
        q = super()._queries(normed, cos, sin, context)
        num_rows, num_heads, width = q.shape
        halves = q.reshape(num_rows, 2, self.stored_config.num_kv_heads, -1, width)
        none = [(0, 0)] * 3
        first = jnp.pad(halves[:, 0], [*none, (0, width)])
        second = jnp.pad(halves[:, 1], [*none, (width, 0)])
        return jnp.stack([first, second], axis=2).reshape(num_rows, num_heads, 2 * width)

    def _keys_and_values(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = super()._keys_and_values(normed, cos, sin, context)
        return _paired(k), _paired(v)


def _paired(
    heads: jax.Array,  # f[num_rows, 2 * num_pairs, width]
) -> jax.Array:  # f[num_rows, num_pairs, 2 * width]
    """Joins head j of the first half with head j of the second half."""
    return jnp.concatenate(jnp.split(heads, 2, axis=1), axis=-1)


def _sum_of_products(
    a: jax.Array,  # f[num_features]
    b: jax.Array,  # f[num_features]
) -> jax.Array:  # f32[]
    return (a * b).astype(jnp.float32).sum()
