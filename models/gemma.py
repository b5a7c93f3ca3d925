"""Gemma 2 and Gemma 3 (text only): the shared decoder with norms on both sides of each part."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.decoder import DecoderForCausalLM
from models.kv_layers import LayerPlacement
from models.layers.attention import Attention, AttentionContext
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import make_norm


class GemmaLayer(nnx.Module):
    """Attention, then the MLP: each reads the normed residual stream and adds its normed output.

    Source: arXiv:2408.00118, section 2.
    """

    def __init__(
        self, config: ModelConfig, *, layer_idx: int, placement: LayerPlacement, dtype: jnp.dtype
    ) -> None:
        self.input_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.self_attn = Attention(config, layer_idx=layer_idx, placement=placement, dtype=dtype)
        # Of attention's output here; of the MLP's input in the other families.
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.pre_feedforward_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype)
        self.post_feedforward_layernorm = make_norm(config, config.hidden_size, dtype=dtype)

    def before_attention(
        self,
        hidden: jax.Array,  # f[num_tokens, hidden]
        context: AttentionContext,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, as `Attention.project_in`."""
        return self.self_attn.project_in(self.input_layernorm(hidden), context)

    def after_attention(
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
