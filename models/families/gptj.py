"""GPT-J: attention and the MLP in parallel, and rotary embeddings of neighboring dimensions."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import read_count, refuse_other_values, with_defaults
from models.config.gpt_fields import is_mask_buffer, with_later_names
from models.config.rope_config import RopeConfig
from models.decoders.biased_head import BiasedHeadDecoder
from models.layers.attention import Attention
from models.layers.decoder_layers import ParallelLayer
from models.layers.dense_layers import make_dense_layers
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.layers.rotary import apply_rotary_to_neighbors
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 50256, "eos_token_id": 50256}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
    ".self_attn.": ".attn.",
    ".input_layernorm.": ".ln_1.",
    ".mlp.up_proj.": ".mlp.fc_in.",
    ".mlp.down_proj.": ".mlp.fc_out.",
}


class GPTJForCausalLM(BiasedHeadDecoder):
    """The vocabulary head has a bias.

    Source: github.com/kingoflolz/mesh-transformer-jax.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LayerNormConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, {"tie_word_embeddings": False})
        fields = read_layer_norm_fields(hf_config, default_activation="gelu_pytorch_tanh")
        heads = read_head_fields({**hf_config, "num_key_value_heads": None, "head_dim": None})
        rotary_dim = heads["head_dim"]
        if hf_config.get("rotary_dim", 64) is not None:
            rotary_dim = read_count(hf_config, "rotary_dim", 64)
        attention = AttentionConfig(**heads, rope=RopeConfig(theta=10_000.0), rotary_dim=rotary_dim)
        return LayerNormConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: LayerNormConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        layers = make_dense_layers(
            config,
            layer=ParallelLayer,
            attention=functools.partial(Attention, rotate=apply_rotary_to_neighbors, dtype=dtype),
            mlp=PlainMLP,
            mlp_bias=True,
            norm=norm,
            dtype=dtype,
        )
        super().__init__(config, layers=layers, norm=norm(config.hidden_size), dtype=dtype)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints rename most modules."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)

    def ignores_weight(self, name: str) -> bool:
        return is_mask_buffer(name)
