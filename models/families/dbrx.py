"""DBRX: layer norms, attention that clips its projections, and experts in every layer."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from models.config.dense_config import read_attention, read_dense_fields
from models.config.fields import read_object, read_optional_number, refuse_other_values
from models.config.moe_config import read_expert_fields
from models.decoders.moe_decoder import MoEDecoder
from models.decoders.softmax_moe import SoftmaxMoEConfig, make_softmax_experts
from models.errors import ModelConfigError
from models.layers.attention import Attention
from models.layers.attention_variants import ClippedAttention
from models.layers.layer_norm import UnbiasedLayerNorm
from models.layers.packed_weights import with_packed_qkv
from models.layers.stacked_experts import with_rows_of_experts
from models.weight_rule import WeightRule, with_stored_names

_EPS = 1e-5  # of all norms
# A norm of order 1 is the sum.
_SUPPORTED = {"tie_word_embeddings": False, "moe_normalize_expert_weights": 1}
# The name of each field in config.json, and the one by which other families read it. As in
# transformers, a config.json may have either.
_SIZES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.norm_f.",
    "model.layers.": "transformer.blocks.",
    ".input_layernorm.": ".norm_attn_norm.norm_1.",
    ".post_attention_layernorm.": ".norm_attn_norm.norm_2.",
    ".self_attn.o_proj.": ".norm_attn_norm.attn.out_proj.",
    ".self_attn.": ".norm_attn_norm.attn.",
    ".mlp.gate.": ".ffn.router.layer.",
    ".mlp.experts.": ".ffn.experts.mlp.",
}
_STORED_EXPERTS = {"gate_proj": "w1", "up_proj": "v1", "down_proj": "w2"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DbrxConfig(SoftmaxMoEConfig):
    """The config of DBRX. `rms_norm_eps` is that of the layer norms."""

    clip: float | None  # bound of queries, keys and values


class DbrxForCausalLM(MoEDecoder):
    """Source: huggingface.co/databricks/dbrx-instruct."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> DbrxConfig:
        attn, ffn = (read_object(hf_config, name) for name in ("attn_config", "ffn_config"))
        # A null means that the weights are not scaled. A missing field means the default.
        norm_order = ffn.get("moe_normalize_expert_weights", 1)
        refuse_other_values({**hf_config, **ffn}, _SUPPORTED)
        flat = {
            **hf_config,
            **{name: hf_config.get(stored, hf_config.get(name)) for stored, name in _SIZES.items()},
            "rope_theta": attn.get("rope_theta", hf_config.get("rope_theta")),
            "num_key_value_heads": attn.get("kv_n_heads") or 1,
            "intermediate_size": ffn.get("ffn_hidden_size") or 3584,
            "hidden_act": read_object(ffn, "ffn_act_fn").get("name"),
            "rms_norm_eps": _EPS,
            "num_experts": ffn.get("moe_num_experts"),
            "num_experts_per_tok": ffn.get("moe_top_k"),
        }
        fields = read_dense_fields(flat)
        attention = read_attention(flat, fields)
        if attn.get("rope_theta") not in (None, attention.rope.theta):
            raise ModelConfigError(
                f"config.json: attn_config.rope_theta is {attn['rope_theta']}, and that of "
                f"rope_parameters is {attention.rope.theta}; expected equal numbers. Use the "
                "config.json that was published with the weights."
            )
        return DbrxConfig(
            **fields,
            **read_expert_fields(
                flat, default_num_experts=4, default_top_k=1, size_field="intermediate_size"
            ),
            attention=(attention,) * fields["num_layers"],
            has_experts=(True,) * fields["num_layers"],
            normalizes_weights=norm_order is not None,
            clip=read_optional_number(attn, "clip_qkv"),
        )

    def __init__(self, config: DbrxConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        attention = functools.partial(Attention, dtype=dtype)
        if config.clip is not None:
            attention = functools.partial(ClippedAttention, bound=config.clip, dtype=dtype)
        super().__init__(
            config,
            attention=attention,
            sparse_mlp=functools.partial(make_softmax_experts, config, dtype),
            norm=functools.partial(UnbiasedLayerNorm, eps=_EPS, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """See `Decoder.weight_rules`. Checkpoints pack attention, and all experts of a layer."""
        rules = with_rows_of_experts(super().weight_rules(), _STORED_EXPERTS)
        rules = with_packed_qkv(rules, self.config.attention, packed="self_attn.Wqkv")
        return with_stored_names(rules, _STORED_NAMES)
