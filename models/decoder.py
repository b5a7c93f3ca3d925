"""The decoder that all families share; what differs comes from the config, or is a layer class."""

import jax
import jax.numpy as jnp
from flax import nnx

from models.carry import Carry
from models.config import ModelConfig
from models.forward_batch import ForwardBatch, KVCache
from models.kernel_settings import KernelSettings
from models.kv_layers import kv_cache_layers, place_layers
from models.layer_context import LayerContext
from models.layer_loop import PlacedLayer, run_in_loop, run_in_turn
from models.layers.attention import Attention
from models.layers.linear import Embedding, Linear
from models.layers.mlp import GatedMLP
from models.layers.rms_norm import make_norm
from models.layers.rotary import rotary_cos_sin
from models.layers.soft_cap import soft_cap_logits
from models.wants import Outputs


class DecoderLayer(nnx.Module):
    """Attention, then the MLP: each reads the normed residual stream and adds to it."""

    def __init__(self, config: ModelConfig, *, layer_idx: int, dtype: jnp.dtype) -> None:
        self.input_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.self_attn = Attention(config, layer_idx=layer_idx, dtype=dtype)
        self.post_attention_layernorm = make_norm(config, config.hidden_size, dtype=dtype)
        self.mlp = GatedMLP(config, dtype=dtype)

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
        self.layers = nnx.List(
            [
                self.layer_class(config, layer_idx=layer_idx, dtype=dtype)
                for layer_idx in range(config.num_layers)
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
    ) -> tuple[Outputs, KVCache]:
        """Runs one step's tokens through all layers; returns what `batch.wants` asks for."""
        batch.wants.check_taps(len(self.layers))
        context = self.make_context(batch, kv_cache, kernels)
        cache_layers = kv_cache_layers(self.config)
        places = place_layers(cache_layers)
        layers = [
            PlacedLayer(layer, places[of_cache.name])
            for layer, of_cache in zip(self.layers, cache_layers, strict=True)
        ]
        run_layers = run_in_loop if kernels.loops_over_layers else run_in_turn
        carry = Carry(hidden=self.embed_tokens(batch.token_ids))
        taps = []
        start = 0
        for tap in batch.wants.taps:
            carry, kv_cache = run_layers(layers[start : tap + 1], carry, kv_cache, context)
            taps.append(carry.hidden)
            start = tap + 1
        if start < len(layers):
            carry, kv_cache = run_layers(layers[start:], carry, kv_cache, context)
        return batch.choose_outputs(self.norm(carry.hidden), tuple(taps)), kv_cache

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
    ) -> LayerContext:
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
        return LayerContext(batch=batch, kernels=kernels, slots=slots, cos_sin=cos_sin)
