"""Self-attention over the paged KV cache."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.attention_config import AttentionConfig
from models.cache.format import Pages
from models.decoder_spec import SELF_ATTENTION
from models.kernel_settings import PAGES_BY_DEVICE, TOKENS_BY_HEAD, WHOLE
from models.layer_context import LayerContext
from models.layers.linear import Linear, parts_of_each, side_by_side
from models.layers.rotary import apply_rotary


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over the layer's own keys and values."""

    def __init__(
        self,
        config: AttentionConfig,
        *,
        q_norm: nnx.Module | None = None,
        k_norm: nnx.Module | None = None,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the layer with weights to be filled in.

        Args:
            q_norm: Of each query head, before it is turned; `k_norm` likewise.
        """
        hidden, head_dim = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        linear_in = functools.partial(
            Linear, hidden, axes=(None, "heads"), use_bias=config.qkv_bias, dtype=dtype
        )
        self.q_proj = linear_in(q_width)
        self.k_proj = linear_in(kv_width)
        self.v_proj = linear_in(kv_width)
        self.o_proj = Linear(
            q_width, hidden, axes=("heads", None), use_bias=config.out_bias, dtype=dtype
        )
        self.q_norm = q_norm
        self.k_norm = k_norm
        self.config = config

    def __call__(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        pages: Pages,
        context: LayerContext,
        *,
        norm: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, head_dim]
        """Attends to `norm(hidden)`; what it returns, `project_out` takes."""
        q, k, v = self.project_in(hidden, context, norm=norm)
        return self.attend(q, k, v, pages, context)

    def project_in(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        context: LayerContext,
        *,
        norm: Callable[[jax.Array], jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries f[num_queries, num_q_heads, head_dim], and keys and values
        f[num_tokens, num_kv_heads, head_dim], normed and turned.
        """
        cos_sin = context.cos_sin[self.config.rotary]

        def project_all(hidden: jax.Array, *cos_sin: jax.Array) -> tuple[jax.Array, ...]:
            projections = [self.q_proj, self.k_proj, self.v_proj]
            q, k, v = map(side_by_side, parts_of_each(projections, [norm(hidden)] * 3))
            return self._queries(q, *cos_sin), self._keys(k, *cos_sin), self._heads(v)

        def project_keys(hidden: jax.Array, *cos_sin: jax.Array) -> tuple[jax.Array, ...]:
            projections = [self.k_proj, self.v_proj]
            k, v = map(side_by_side, parts_of_each(projections, [norm(hidden)] * 2))
            return self._keys(k, *cos_sin), self._heads(v)

        if not context.drops_rows:
            return context.by_token(project_all, hidden, *cos_sin)
        k, v = context.by_token(project_keys, hidden, *cos_sin)
        q = self.q_proj(norm(context.kept(hidden)))
        return self._queries(q, *map(context.kept, cos_sin)), k, v

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    ) -> jax.Array:  # f[num_queries, hidden]
        return self.o_proj(attended.reshape(-1, self.config.num_q_heads * self.config.head_dim))

    def _queries(self, q: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        q = self._heads(q)
        return apply_rotary(q if self.q_norm is None else self.q_norm(q), cos, sin)

    def _keys(self, k: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        k = self._heads(k)
        return apply_rotary(k if self.k_norm is None else self.k_norm(k), cos, sin)

    def _heads(self, x: jax.Array) -> jax.Array:  # f[rows, heads * head_dim] -> f[rows, heads, ..]
        return x.reshape(x.shape[0], -1, self.config.head_dim)

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
        v: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
        pages: Pages,
        context: LayerContext,
    ) -> tuple[jax.Array, Pages]:  # f[num_queries, num_q_heads, head_dim]
        """The part without weights: writes keys and values into the layer's cache, and attends."""
        kernels, cache = context.kernels, context.cache(SELF_ATTENTION)
        chosen = {
            "kv_dtype": cache.format.kv_dtype(pages),
            "implementation": kernels.implementation,
            "target": kernels.target,
        }

        def of_own_heads(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            pages: Pages,
            slots: jax.Array,
            *sequences: jax.Array,
        ) -> tuple[jax.Array, Pages]:
            view = cache.format.view(pages, cache.block_size, num_shards=kernels.num_shards)
            view = pallas_kernels.kv_scatter(view, k, v, slots, cache.row, **chosen)
            attended = pallas_kernels.paged_attention(
                *(q, view, cache.row, *sequences),
                scale=self.config.scale,
                sliding_window=self.config.sliding_window,
                soft_cap=self.config.soft_cap,
                max_query_len=context.num_queries_per_req,
                batch_invariant=kernels.batch_invariant,
                **chosen,
            )
            return attended, cache.format.unview(view, pages)

        attended, pages = kernels.by_head(
            of_own_heads,
            *(_with_width(x, cache.format.head_dim) for x in (q, k, v)),
            *(pages, cache.slots, cache.block_tables, cache.seq_lens, context.query_start_loc),
            in_specs=(*[TOKENS_BY_HEAD] * 3, PAGES_BY_DEVICE, *[WHOLE] * 4),
            out_specs=(TOKENS_BY_HEAD, PAGES_BY_DEVICE),
        )
        return attended[..., : self.config.head_dim], pages


def _with_width(
    heads: jax.Array,  # f[num_tokens, heads, head_dim]
    head_dim: int,
) -> jax.Array:  # f[num_tokens, heads, head_dim], of that width
    """Heads as wide as they are stored; zeros change neither products nor what is read."""
    return jnp.pad(heads, ((0, 0), (0, 0), (0, head_dim - heads.shape[-1])))
