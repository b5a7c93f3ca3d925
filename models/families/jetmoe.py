"""JetMoE: experts in attention and the MLP. The experts of attention share keys and values."""

import functools
from collections.abc import Mapping

import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_count, refuse_other_values, with_defaults
from models.config.moe_config import MoEConfig, read_expert_fields
from models.decoders.decoder import Decoder
from models.decoders.moe_decoder import make_moe_layers
from models.layers.biased_sparse_mlp import BiasedSparseMLP
from models.layers.expert_attention import ExpertAttention, ExpertAttentionLayer
from models.layers.experts import make_experts, packed_gate_up_rules
from models.layers.packed_weights import with_packed_rows
from models.layers.rms_norm import RMSNorm
from models.layers.routing import Router, SoftmaxTopK
from models.layers.stacked_experts import with_source
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "max_position_embeddings": 4096,
    "initializer_range": 0.01,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Fields of the first releases.
_SUPPORTED = {"bias": True, "glu": True}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".mlp.experts.gate_up_proj": ".mlp.input_linear.weight",
    ".mlp.experts.down_proj": ".mlp.output_linear.weight",
    ".mlp.gate.": ".mlp.router.layer.",
    ".self_attn.q_proj.": ".self_attention.experts.input_linear.",
    ".self_attn.o_proj.": ".self_attention.experts.output_linear.",
    ".self_attn.router.": ".self_attention.experts.router.layer.",
    ".self_attn.bias": ".self_attention.experts.bias",
    ".self_attn.": ".self_attention.",
}
# Of all norms except the last one, whatever `rms_norm_eps` is.
_LAYER_EPS = 1e-6


class JetMoeForCausalLM(Decoder):
    """Source: arXiv:2404.07413."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MoEConfig:
        """See `Decoder.read_config`. `rms_norm_eps` is that of the last norm."""
        hf_config = with_defaults(hf_config, _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        fields = read_dense_fields(
            hf_config, activation_field="activation_function", default_tie_word_embeddings=True
        )
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("num_local_experts",),
            default_num_experts=8,
            default_top_k=2,
            size_field="intermediate_size",
        )
        return MoEConfig(
            **fields,
            **experts,
            attention=(_read_attention(hf_config, fields, experts["num_experts_per_tok"]),)
            * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
        )

    def __init__(self, config: MoEConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        choose = SoftmaxTopK(top_k=config.num_experts_per_tok, normalizes=True)
        norm = functools.partial(RMSNorm, dtype=dtype)
        layers = make_moe_layers(
            config,
            layer=ExpertAttentionLayer,
            attention=functools.partial(
                ExpertAttention, num_experts=config.num_experts, choose=choose, dtype=dtype
            ),
            sparse_mlp=functools.partial(_make_sparse_mlp, config, choose, dtype),
            norm=functools.partial(norm, eps=_LAYER_EPS),
            dtype=dtype,
        )
        super().__init__(
            config,
            layers=layers,
            norm=norm(config.hidden_size, eps=config.rms_norm_eps),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack all experts of a layer, and keys, values."""
        attention, num_layers = self.config.attention[0], self.config.num_layers
        width = attention.num_kv_heads * attention.head_dim
        rules = with_packed_rows(
            super().weight_rules(),
            {"self_attn.k_proj": width, "self_attn.v_proj": width},
            num_layers=num_layers,
            packed="self_attn.kv_proj",
        )
        rules |= packed_gate_up_rules({name: r for name, r in rules.items() if ".mlp." in name})
        for layer_idx in range(num_layers):
            for projection in ("q_proj", "o_proj"):
                name = f"layers.{layer_idx}.self_attn.{projection}"
                rule = rules[f"{name}.kernel"]
                shape = (len(rule.sources), *rule.sources[0].shape)
                rules[f"{name}.kernel"] = with_source(rule, f"model.{name}.weight", shape)

        return with_stored_names(rules, _STORED_NAMES)


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object], top_k: int
) -> AttentionConfig:
    """Reads the attention of a layer: each expert of a token has one query per KV head."""
    num_kv_heads = read_count(hf_config, "num_key_value_heads")
    heads = {
        "num_attention_heads": num_kv_heads * top_k,
        # As in transformers, the common name counts if there are both.
        "head_dim": read_count(hf_config, "head_dim", read_count(hf_config, "kv_channels", 128)),
    }
    return read_attention({**hf_config, **heads}, fields)


def _make_sparse_mlp(config: MoEConfig, choose: SoftmaxTopK, dtype: jnp.dtype) -> BiasedSparseMLP:
    return BiasedSparseMLP(
        config.hidden_size,
        gate=Router(config.hidden_size, config.num_experts, dtype=dtype),
        choose=choose,
        experts=make_experts(config, dtype=dtype),
        dtype=dtype,
    )
