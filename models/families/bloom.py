"""BLOOM: ALiBi in place of positions, layer norms, and a norm of the embeddings."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.alibi_slopes import make_alibi_slopes
from models.config.attention_config import AttentionConfig
from models.config.dense_config import LayerNormConfig, read_head_fields, read_layer_norm_fields
from models.config.fields import refuse_other_values, with_defaults
from models.config.gpt_fields import with_later_names
from models.config.rope_config import RopeConfig
from models.decoders.dense_decoder import DenseDecoder
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext
from models.layers.layer_norm import LayerNorm
from models.layers.mlp import PlainMLP
from models.layers.packed_weights import with_grouped_qkv
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"bos_token_id": 1, "eos_token_id": 2, "seq_length": 2048}
_SUPPORTED = {"apply_residual_connection_post_layernorm": False}
# Names of modules here, and in checkpoints of BLOOM and Falcon.
STORED_NAMES = {
    "model.embed_tokens.": "transformer.word_embeddings.",
    "model.embed_norm.": "transformer.word_embeddings_layernorm.",
    "model.layers.": "transformer.h.",
    "model.norm.": "transformer.ln_f.",
    ".self_attn.o_proj.": ".self_attention.dense.",
    ".mlp.up_proj.": ".mlp.dense_h_to_4h.",
    ".mlp.down_proj.": ".mlp.dense_4h_to_h.",
}
PACKED_QKV = "self_attention.query_key_value"


class BloomForCausalLM(DenseDecoder):
    """Source: arXiv:2211.05100, section 3.2."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LayerNormConfig:
        hf_config = with_defaults(with_later_names(hf_config), _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_layer_norm_fields(
            # ALiBi has no longest sequence; releases state the one of their training.
            {**hf_config, "max_position_embeddings": hf_config["seq_length"]},
            default_activation="gelu_pytorch_tanh",
            default_tie_word_embeddings=True,
        )
        attention = read_alibi_attention(hf_config, has_bias=True)
        return LayerNormConfig(**fields, attention=(attention,) * fields["num_layers"])

    def __init__(self, config: LayerNormConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(LayerNorm, eps=config.layer_norm_eps, dtype=dtype)
        super().__init__(
            config,
            mlp=PlainMLP,
            mlp_bias=True,
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
        self.embed_norm = norm(config.hidden_size)

    def embed(self, context: LayerContext) -> Carry:
        """See `Decoder.embed`."""
        return Carry(hidden=self.embed_norm(super().embed(context).hidden))

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints join queries, keys and values, head by head, and rename most modules."""
        rules = with_grouped_qkv(super().weight_rules(), self.config.attention, packed=PACKED_QKV)
        return with_stored_names(rules, STORED_NAMES)


def read_alibi_attention(
    hf_config: Mapping[str, object], *, has_bias: bool, max_bias: float = 8.0
) -> AttentionConfig:
    """Reads attention with ALiBi, and with a key and a value for each query head.

    Args:
        max_bias: As in `make_alibi_slopes`.
    """
    heads = read_head_fields({**hf_config, "num_key_value_heads": None, "head_dim": None})
    return AttentionConfig(
        **heads,
        rope=RopeConfig(theta=10_000.0),
        has_positions=False,
        alibi_slopes=make_alibi_slopes(heads["num_q_heads"], max_bias=max_bias),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
