"""Self-attention over the paged KV cache. The classes differ in where keys and values come from."""

import abc

import jax
import jax.numpy as jnp
from flax import nnx

from models.cache.format import Pages
from models.config.attention_config import AttentionConfig
from models.forward.layer_context import LayerContext
from models.layers.attend import attend
from models.layers.linear import Linear
from models.layers.rotary import Rotate, apply_rotary
from models.layers.self_attention import Norm
from models.weight_rule import Source, SplitAxis, WeightRule


class AttentionBase(nnx.Module):
    """The parts that all classes share: queries with rotary positions, sinks, output projection."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module | None,
        rotate: Rotate,
        dtype: jnp.dtype,
    ) -> None:
        self.q_proj = _linear_in(config, config.num_q_heads * config.head_dim, dtype)
        self.o_proj = Linear(
            config.num_q_heads * config.value_head_dim,
            config.hidden_size,
            axes=("heads", None),
            use_bias=config.out_bias,
            dtype=dtype,
        )
        self.q_norm = q_norm
        self.rotate = rotate
        sinks = nnx.Param(jnp.zeros((config.num_q_heads,), dtype)) if config.has_sinks else None
        self.sinks = sinks
        self.config = config

    def weight_rules(self, name: str) -> dict[str, WeightRule]:
        """See `HasWeights.weight_rules`."""
        if self.sinks is None:
            return {}
        source = Source(name=f"{name}.sinks", shape=(self.config.num_q_heads,))
        return {"sinks": WeightRule(sources=(source,), layout="vector", axes=("heads",))}

    @abc.abstractmethod
    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, v_head_dim]
        """Computes attention of `norm(hidden)`, without the output projection (`project_out`).

        Returns:
            The heads' outputs, and the pages with the step's keys and values.
        """

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, v_head_dim]
        context: LayerContext,
    ) -> jax.Array:  # f[num_queries, hidden]
        width = self.config.num_q_heads * self.config.value_head_dim
        return self.o_proj(attended.reshape(-1, width), context)

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        new_kv: tuple[jax.Array, jax.Array] | None,
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, v_head_dim]
        """Calls `models.layers.attend.attend` with the layer's config and sinks."""
        sinks = None if self.sinks is None else self.sinks[...]
        return attend(self.config, q, new_kv, pages, context, sinks=sinks)

    def _queries(
        self,
        normed: jax.Array,  # f[num_rows, hidden]
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, num_q_heads, head_dim]
        q = split_heads(self._project_queries(normed, context), self.config.head_dim)
        return self._placed(q, self.q_norm, cos, sin)

    def _project_queries(self, normed: jax.Array, context: LayerContext) -> jax.Array:
        return self.q_proj(normed, context)

    def _placed(
        self,
        heads: jax.Array,  # f[num_rows, num_heads, head_dim]
        norm: nnx.Module | None,
        cos: jax.Array,  # f32[num_rows, rotary_dim // 2]
        sin: jax.Array,  # f32[num_rows, rotary_dim // 2]
    ) -> jax.Array:  # f[num_rows, num_heads, head_dim]
        """Norms the heads of queries or keys, then rotates them to their positions."""
        return self.rotate(heads if norm is None else norm(heads), cos, sin)


class Attention(AttentionBase):
    """Grouped-query attention with rotary positions over the layer's own keys and values."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        v_norm: nnx.Module | None = None,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            q_norm: Norm of each query head, before it is rotated. None: queries are not normed.
            k_norm: The same for each key head.
            v_norm: Norm of each value head. None: values are not normed.
            rotate: Turns queries and keys.
        """
        super().__init__(config, q_norm=q_norm, rotate=rotate, dtype=dtype)
        widths = [config.num_kv_heads * dim for dim in (config.head_dim, config.value_head_dim)]
        self.k_proj, self.v_proj = (
            _linear_in(config, width, dtype, axis="kv_heads") for width in widths
        )
        self.k_norm = k_norm
        self.v_norm = v_norm

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        q, k, v = self.project_in(hidden, context, norm=norm)
        return self.attend(q, (k, v), pages, context)

    def project_in(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        context: LayerContext,
        *,
        norm: Norm,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Projects, norms and rotates queries and keys; projects and norms values.

        Returns:
            Queries f[num_queries, num_q_heads, head_dim],
            keys f[num_tokens, num_kv_heads, head_dim],
            and values f[num_tokens, num_kv_heads, v_head_dim].
        """
        cos_sin = context.cos_sin[self.config.rotary]

        def project_all(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> tuple[jax.Array, ...]:
            normed = norm(hidden)
            q = self._queries(normed, cos, sin, context)
            return q, *self._keys_and_values(normed, cos, sin, context)

        def project_keys(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> tuple[jax.Array, jax.Array]:
            return self._keys_and_values(norm(hidden), cos, sin, context)

        if not context.drops_rows:
            return context.by_token(project_all, hidden, *cos_sin)
        k, v = context.by_token(project_keys, hidden, *cos_sin)
        normed = norm(context.kept(hidden))
        q = self._queries(normed, *map(context.kept, cos_sin), context.of_kept())
        return q, k, v

    def _keys_and_values(
        self,
        normed: jax.Array,  # f[num_rows, hidden]
        cos: jax.Array,
        sin: jax.Array,
        context: LayerContext,
    ) -> tuple[jax.Array, jax.Array]:
        k, v = self._project_keys_and_values(normed, context)
        k, v = split_heads(k, self.config.head_dim), split_heads(v, self.config.value_head_dim)
        k = self._placed(k, self.k_norm, cos, sin)
        return k, v if self.v_norm is None else self.v_norm(v)

    def _project_keys_and_values(
        self, normed: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        return self.k_proj(normed, context), self.v_proj(normed, context)


class KeysAsValuesAttention(Attention):
    """One projection for keys and values. They differ in their norms, and only keys are rotated."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        v_norm: nnx.Module | None = None,
        rotate: Rotate = apply_rotary,
        dtype: jnp.dtype,
    ) -> None:
        norms = {"q_norm": q_norm, "k_norm": k_norm, "v_norm": v_norm}
        super().__init__(config, **norms, rotate=rotate, dtype=dtype)
        del self.v_proj

    def _project_keys_and_values(
        self, normed: jax.Array, context: LayerContext
    ) -> tuple[jax.Array, jax.Array]:
        k = self.k_proj(normed, context)
        return k, k


class SharedKVAttention(AttentionBase):
    """Attention to the keys and values of an earlier layer (`AttentionConfig.kv_layer_idx`)."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            q_norm: Norm of each query head, before it is rotated.
        """
        super().__init__(config, q_norm=q_norm, rotate=apply_rotary, dtype=dtype)

    def __call__(
        self, hidden: jax.Array, pages: Pages, context: LayerContext, *, norm: Norm
    ) -> tuple[jax.Array, Pages]:
        def project(
            hidden: jax.Array, cos: jax.Array, sin: jax.Array, context: LayerContext
        ) -> jax.Array:
            return self._queries(norm(hidden), cos, sin, context)

        cos_sin = context.cos_sin[self.config.rotary]
        q = context.of_kept().by_token(project, *map(context.kept, (hidden, *cos_sin)))
        return self.attend(q, None, pages, context)


def _linear_in(
    config: AttentionConfig, width: int, dtype: jnp.dtype, *, axis: SplitAxis = "heads"
) -> Linear:
    return Linear(
        config.hidden_size, width, axes=(None, axis), use_bias=config.qkv_bias, dtype=dtype
    )


def split_heads(
    x: jax.Array,  # f[num_rows, num_heads * head_dim]
    head_dim: int,
) -> jax.Array:  # f[num_rows, num_heads, head_dim]
    return x.reshape(x.shape[0], -1, head_dim)
