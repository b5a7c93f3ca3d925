"""The decoder that all families share; what differs comes from the config, or is a layer class."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.config import ModelConfig
from models.forward_batch import ForwardBatch, KVCache
from models.kernel_settings import KernelSettings
from models.kv_layers import LayerPlacement, kv_cache_layers, place_layers
from models.layer_loop import run_in_loop, run_in_turn
from models.layers.attention import Attention, AttentionContext
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import make_norm
from models.layers.rotary import rotary_cos_sin
from models.layers.soft_cap import soft_cap_logits


class DecoderLayer(nnx.Module):
    """Attention, then the MLP: each reads the normed residual stream and adds to it."""

    def __init__(
        self, config: ModelConfig, *, layer_idx: int, placement: LayerPlacement, dtype: jnp.dtype
    ) -> None:
        self.input_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.self_attn = Attention(config, layer_idx=layer_idx, placement=placement, dtype=dtype)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype)

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
        hidden = hidden + self.self_attn.project_out(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class DecoderForCausalLM(nnx.Module):
    """Token embedding, decoder layers, final norm and vocabulary head.

    A family whose layers are built differently names their class in `layer_class`. Attribute names
    are those of Hugging Face checkpoints: `models/loading/weight_names.py` relies on it.
    """

    layer_class: type[nnx.Module] = DecoderLayer

    def __init__(self, config: ModelConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        """Makes the model with weights to be filled in.

        Args:
            has_head_kernel: Whether the vocabulary head has an array of its own. Without tied
                embeddings it must; with them it may, as a transposed copy.
        """
        self.config = config
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, dtype=dtype, scale=config.embedding_scale
        )
        cache_layers = kv_cache_layers(config)
        placements = place_layers(cache_layers)
        self.layers = nnx.List(
            [
                self.layer_class(
                    config, layer_idx=layer_idx, placement=placements[layer.name], dtype=dtype
                )
                for layer_idx, layer in enumerate(cache_layers)
            ]
        )
        self.norm = make_norm(config, config.hidden_size, dtype=dtype)
        self.lm_head = (
            Linear(config.hidden_size, config.vocab_size, use_bias=False, dtype=dtype)
            if has_head_kernel
            else None
        )

    def __call__(
        self, batch: ForwardBatch, kv_cache: KVCache, kernels: KernelSettings
    ) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden], or f[num_reqs, hidden]
        """Runs one step's tokens through all layers; returns hidden states after the last norm."""
        context = self.make_context(batch, kv_cache, kernels)
        hidden = self.embed_tokens(batch.token_ids)
        run_layers = run_in_loop if kernels.loops_over_layers else run_in_turn
        hidden, kv_cache = run_layers(self.layers, hidden, kv_cache, context)
        return self.norm(hidden), kv_cache

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
    ) -> jax.Array:  # f32[num_logits, vocab]
        if self.lm_head is None:
            logits = self.embed_tokens.attend(hidden)
        else:
            logits = self.lm_head.product(hidden)
        return soft_cap_logits(logits, self.config.logits_soft_cap)

    def make_context(
        self, batch: ForwardBatch, kv_cache: KVCache, kernels: KernelSettings
    ) -> AttentionContext:
        """What the layers share in this step."""
        num_groups = batch.block_tables.shape[0]
        slots = kernels.slot_mapping(
            jnp.broadcast_to(batch.positions, (num_groups, *batch.positions.shape)),
            batch.block_tables,
            batch.query_start_loc,
            cache_shape=kv_cache.k.shape,
        )
        cos_sin = tuple(
            rotary_cos_sin(batch.positions, rope, self.config.head_dim)
            for rope in self.config.ropes
        )
        return AttentionContext(batch=batch, kernels=kernels, slots=slots, cos_sin=cos_sin)
