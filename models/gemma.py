"""Gemma 2 and Gemma 3 (text only): the shared decoder with norms on both sides of each part."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.carry import Carry
from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.forward_batch import KVCache
from models.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import make_norm


class GemmaLayer(nnx.Module):
    """Attention, then the MLP: each reads the normed residual stream and adds its normed output.

    Source: arXiv:2408.00118, section 2.
    """

    def __init__(self, config: ModelConfig, *, layer_idx: int, dtype: jnp.dtype) -> None:
        self.input_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.self_attn = Attention(config, layer_idx=layer_idx, dtype=dtype)
        # Of attention's output here; of the MLP's input in the other families.
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, dtype=dtype)

    def __call__(
        self, carry: Carry, kv_cache: KVCache, context: LayerContext
    ) -> tuple[Carry, KVCache]:
        attended, kv_cache = self.self_attn(
            carry.hidden, kv_cache, context, norm=self.input_layernorm
        )
        hidden = context.by_token(self._add_parts, context.kept(carry.hidden), attended)
        return Carry(hidden=hidden), kv_cache

    def _add_parts(
        self,
        hidden: jax.Array,  # f[num_queries, hidden]
        attended: jax.Array,  # f[num_queries, num_q_heads, head_dim]
    ) -> jax.Array:  # f[num_queries, hidden]
        out = self.self_attn.project_out(attended)
        hidden = hidden + self.post_attention_layernorm(out)
        out = self.mlp(self.pre_feedforward_layernorm(hidden))
        return hidden + self.post_feedforward_layernorm(out)


class Gemma2ForCausalLM(DecoderForCausalLM):
    """Soft caps on attention and on the logits, and a sliding window on every second layer."""

    layer_class = GemmaLayer


class Gemma3ForCausalLM(DecoderForCausalLM):
    """RMS-normed queries and keys instead of caps, and a rotary base of its own where it slides."""

    layer_class = GemmaLayer
