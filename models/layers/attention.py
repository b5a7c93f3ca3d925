"""Self-attention over the paged KV cache."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.config import ModelConfig
from models.forward_batch import ForwardBatch, KVCache
from models.kernel_settings import CACHE_BY_HEAD, TOKENS_BY_HEAD, WHOLE, KernelSettings
from models.kv_layers import LayerPlacement
from models.layers.linear import Linear, parts_of_each, side_by_side
from models.layers.rms_norm import make_norm
from models.layers.rotary import apply_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What all layers of a step share, computed once."""

    batch: ForwardBatch
    kernels: KernelSettings
    slots: jax.Array  # i32[num_groups, num_tokens], where each token's key and value are written
    # For each of the model's `ropes`: cosine and sine, f32[num_tokens, head_dim // 2].
    cos_sin: tuple[tuple[jax.Array, jax.Array], ...]
    # Whether only the last token of each request goes on from here, and attends; the others leave
    # their keys and values.
    only_last_tokens: bool = False

    def of_last_layer(self) -> "AttentionContext":
        """Nobody reads what the last layer makes of tokens that `only_last_tokens` leaves out."""
        return replace(self, only_last_tokens=self.batch.only_last_tokens)

    @property
    def num_queries_per_req(self) -> int | None:
        """No request has more tokens that attend; None promises nothing."""
        return 1 if self.only_last_tokens else self.batch.max_query_len

    @property
    def query_start_loc(self) -> jax.Array:  # i32[num_reqs + 1]
        """`ForwardBatch.query_start_loc` of the tokens that attend."""
        starts = self.batch.query_start_loc
        if not self.only_last_tokens:
            return starts
        num_used = (starts[1:] > starts[:-1]).sum(dtype=jnp.int32)
        return jnp.minimum(jnp.arange(starts.shape[0], dtype=jnp.int32), num_used)

    def of_width(self, num_tokens: int) -> "AttentionContext":
        """Of the first tokens."""
        cos_sin = tuple((cos[:num_tokens], sin[:num_tokens]) for cos, sin in self.cos_sin)
        return replace(self, cos_sin=cos_sin)

    def queries_of(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_queries, ...]
        """What belongs to the tokens that attend."""
        return x[self.batch.logits_indices] if self.only_last_tokens else x


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and normed queries and keys where asked.

    It comes in three parts, `project_in`, `attend` and `project_out`: only `attend` has no weights.
    What differs between the layers of a model is settled here: which block table and row of the
    cache, which rotary embedding, and how far a token sees.
    """

    def __init__(
        self, config: ModelConfig, *, layer_idx: int, placement: LayerPlacement, dtype: jnp.dtype
    ) -> None:
        hidden, head_dim = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        self.q_proj = Linear(hidden, q_width, use_bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_width, use_bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_width, use_bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(q_width, hidden, use_bias=config.attention_out_bias, dtype=dtype)
        self.q_norm = make_norm(config, head_dim, dtype=dtype) if config.use_qk_norm else None
        self.k_norm = make_norm(config, head_dim, dtype=dtype) if config.use_qk_norm else None
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.group_idx = placement.group_idx
        self.row = placement.row
        self.rope_idx = config.ropes.index(config.layer_rope(layer_idx))
        self.sliding_window = config.layer_window(layer_idx)
        self.scale = config.attention_scale
        self.soft_cap = config.attention_soft_cap

    def project_in(
        self,
        x: jax.Array,  # f[num_tokens, hidden]
        context: AttentionContext,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries f[num_queries, num_q_heads, head_dim], and keys and values
        f[num_tokens, num_kv_heads, head_dim], normed and turned.
        """
        num_tokens = x.shape[0]
        x_of_queries = context.queries_of(x)
        num_queries = x_of_queries.shape[0]
        projections = [self.q_proj, self.k_proj, self.v_proj]
        q, k, v = map(side_by_side, parts_of_each(projections, [x_of_queries, x, x]))
        q = q.reshape(num_queries, self.num_q_heads, self.head_dim)
        k = k.reshape(num_tokens, self.num_kv_heads, self.head_dim)
        v = v.reshape(num_tokens, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = context.cos_sin[self.rope_idx]
        k = apply_rotary(k, cos, sin)
        q = apply_rotary(q, context.queries_of(cos), context.queries_of(sin))
        return q, k, v

    def project_out(
        self,
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    ) -> jax.Array:  # f[num_queries, hidden]
        return self.o_proj(attended.reshape(-1, self.num_q_heads * self.head_dim))

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """All that tells a layer from others of its model, but for parameters, group and row."""
        return (self.sliding_window, self.scale, self.soft_cap, self.rope_idx)

    def attend(
        self,
        q: jax.Array,  # f[num_queries, num_q_heads, head_dim]
        k: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
        v: jax.Array,  # f[num_tokens, num_kv_heads, head_dim]
        kv_cache: KVCache,
        context: AttentionContext,
        *,
        group_idx: int | jax.Array,  # i32[], as in `LayerPlacement`
        row: int | jax.Array,  # i32[], likewise
    ) -> tuple[jax.Array, KVCache]:  # f[num_queries, num_q_heads, head_dim]
        """The part without weights: writes keys and values into a row, and attends to it."""
        batch, kernels = context.batch, context.kernels
        chosen = {"implementation": kernels.implementation, "target": kernels.target}

        def of_own_heads(
            q: jax.Array,
            k: jax.Array,
            v: jax.Array,
            k_cache: jax.Array,
            v_cache: jax.Array,
            slots: jax.Array,
            *sequences: jax.Array,
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            k_cache, v_cache = pallas_kernels.kv_scatter(
                k_cache, v_cache, k, v, slots, row, **chosen
            )
            attended = pallas_kernels.paged_attention(
                *(q, k_cache, v_cache, row, *sequences),
                scale=self.scale,
                sliding_window=self.sliding_window,
                soft_cap=self.soft_cap,
                max_query_len=context.num_queries_per_req,
                batch_invariant=kernels.batch_invariant,
                **chosen,
            )
            return attended, k_cache, v_cache

        attended, k_cache, v_cache = kernels.by_head(
            *(of_own_heads, q, k, v, kv_cache.k, kv_cache.v),
            context.slots[group_idx],
            batch.block_tables[group_idx],
            batch.seq_lens[group_idx],
            context.query_start_loc,
            in_specs=(*[TOKENS_BY_HEAD] * 3, *[CACHE_BY_HEAD] * 2, *[WHOLE] * 4),
            out_specs=(TOKENS_BY_HEAD, CACHE_BY_HEAD, CACHE_BY_HEAD),
        )
        return attended, KVCache(k=k_cache, v=v_cache)
