"""Self-attention over the paged KV cache."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from models.config import ModelConfig
from models.forward_batch import ForwardBatch, KVCache
from models.layers.linear import Linear
from models.layers.rms_norm import RMSNorm
from models.layers.rotary import apply_rotary


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """What all layers of a step share, computed once."""

    batch: ForwardBatch
    slots: jax.Array  # i32[num_groups, num_tokens], where each token's key and value are written
    cos: jax.Array  # f32[num_tokens, head_dim // 2]
    sin: jax.Array  # f32[num_tokens, head_dim // 2]


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions, and normed queries and keys where asked."""

    def __init__(self, config: ModelConfig, *, group_idx: int, row: int, dtype: jnp.dtype) -> None:
        """Makes the attention of the layer that is number `row` of KV cache group `group_idx`."""
        hidden, head_dim = config.hidden_size, config.head_dim
        q_width, kv_width = config.num_q_heads * head_dim, config.num_kv_heads * head_dim
        self.q_proj = Linear(hidden, q_width, use_bias=config.qkv_bias, dtype=dtype)
        self.k_proj = Linear(hidden, kv_width, use_bias=config.qkv_bias, dtype=dtype)
        self.v_proj = Linear(hidden, kv_width, use_bias=config.qkv_bias, dtype=dtype)
        self.o_proj = Linear(q_width, hidden, use_bias=config.attention_out_bias, dtype=dtype)
        norm = functools.partial(RMSNorm, head_dim, eps=config.rms_norm_eps, dtype=dtype)
        self.q_norm = norm() if config.use_qk_norm else None
        self.k_norm = norm() if config.use_qk_norm else None
        self.num_q_heads = config.num_q_heads
        self.num_kv_heads = config.num_kv_heads
        self.head_dim = head_dim
        self.group_idx = group_idx
        self.row = row

    def __call__(
        self,
        x: jax.Array,  # f[num_tokens, hidden]
        kv_cache: KVCache,
        context: AttentionContext,
    ) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden]
        """Writes this step's keys and values, then attends to everything cached so far."""
        num_tokens = x.shape[0]
        q = self.q_proj(x).reshape(num_tokens, self.num_q_heads, self.head_dim)
        k = self.k_proj(x).reshape(num_tokens, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).reshape(num_tokens, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = apply_rotary(q, context.cos, context.sin)
        k = apply_rotary(k, context.cos, context.sin)

        batch = context.batch
        k_cache, v_cache = pallas_kernels.kv_scatter(
            kv_cache.k, kv_cache.v, k, v, context.slots[self.group_idx], self.row
        )
        attended = pallas_kernels.paged_attention(
            q,
            k_cache,
            v_cache,
            self.row,
            batch.block_tables[self.group_idx],
            batch.seq_lens[self.group_idx],
            batch.query_start_loc,
            scale=self.head_dim**-0.5,
        )
        out = self.o_proj(attended.reshape(num_tokens, self.num_q_heads * self.head_dim))
        return out, KVCache(k=k_cache, v=v_cache)
