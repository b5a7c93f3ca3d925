"""Kinds of `Attention` that change queries, keys and values in more ways than `Attention` does."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.rotary import Rotate, apply_rotary


class NormedLastAttention(Attention):
    """Attention that norms queries and keys after their rotation."""

    def _placed(
        self, heads: jax.Array, norm: nnx.Module | None, cos: jax.Array, sin: jax.Array
    ) -> jax.Array:
        turned = self.rotate(heads, cos, sin)
        return turned if norm is None else norm(turned)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryScale:
    """Factors of queries that grow with the position: `1 + weight * log(1 + number)`.

    `number` counts the full periods before the position: `(position + offset) // period`.

    Source: arXiv:2501.19399, section 3.
    """

    weight: float
    period: int
    offset: int

    def factors(
        self,
        positions: jax.Array,  # i32[num_rows]
    ) -> jax.Array:  # f32[num_rows]
        number = (positions + self.offset) // self.period
        return 1.0 + self.weight * jnp.log1p(number.astype(jnp.float32))


class ScaledQueriesAttention(Attention):
    """Attention whose queries have a factor that grows with their position."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        query_scale: QueryScale,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(config, rotate=rotate, dtype=dtype)
        self.query_scale = query_scale

    def _queries(
        self, normed: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
    ) -> jax.Array:
        q = super()._queries(normed, cos, sin, context)
        factors = self.query_scale.factors(context.of_rows(context.batch.positions))
        return (q.astype(jnp.float32) * factors[:, None, None]).astype(q.dtype)


class ClippedAttention(Attention):
    """Attention that clips the projected queries, keys and values to [-bound, bound]."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        bound: float,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        dtype: jnp.dtype,
    ) -> None:
        super().__init__(config, q_norm=q_norm, k_norm=k_norm, dtype=dtype)
        self.bound = bound

    def _project_queries(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        return self._clipped(super()._project_queries(normed, context))

    def _project_keys_and_values(
        self, normed: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k, v = super()._project_keys_and_values(normed, context)
        return self._clipped(k), self._clipped(v)

    def _clipped(self, x: jax.Array) -> jax.Array:
        return jnp.clip(x, -self.bound, self.bound)
