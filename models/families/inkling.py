"""Inkling (text): in place of positions, a bias by distance that each query mixes; short
convolutions of keys, values, and the outputs of attention and MLPs; a router that also scores the
shared experts.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from models.config.dense_config import read_dense_fields
from models.config.fields import (
    read_count,
    read_layer_numbers,
    read_number,
    refuse_other_values,
    with_defaults,
    with_main_names,
)
from models.config.layer_types import with_window
from models.config.moe_config import MoEConfig, read_expert_fields, read_mlp_layer_types
from models.config.relative_attention_config import RelativeAttentionConfig
from models.config.rope_config import RopeConfig
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states_in
from models.decoders.moe_decoder import MoEDecoder
from models.errors import ModelConfigError
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.convolved_layer import CONVOLUTIONS, ConvolvedLayer, format_of_windows
from models.layers.experts import make_experts, packed_gate_up_rules
from models.layers.relative_attention import RelativeAttention
from models.layers.rms_norm import RMSNorm
from models.layers.scored_shared_experts import (
    ScoredSharedMLP,
    SharedExperts,
    SharedScoresRouter,
    SharedSigmoidTopK,
    TrainedScaleMLP,
    packed_shared_rules,
)
from models.weight_rule import WeightRule, with_stored_names

_FULL, _SLIDING = "hybrid", "hybrid_sliding"
# Other names of fields -> names here.
_MAIN_NAMES = {
    "embedding_multiplier": "logits_mup_width_multiplier",
    "model_max_length": "max_position_embeddings",
    "sconv_kernel_size": "conv_kernel_size",
    "sliding_window": "sliding_window_size",
}
# Names of modules here -> names on the hub, replaced in this order.
_HUB_NAMES = {
    "lm_head.": "model.llm.unembed.",
    "model.embed_tokens.embed_norm.": "model.llm.embed_norm.",
    "model.embed_tokens.": "model.llm.embed.",
    "model.layers.": "model.llm.layers.",
    "model.norm.": "model.llm.norm.",
    "sconv.conv1d.": "sconv.",
    ".self_attn.q_proj.": ".attn.wq_du.",
    ".self_attn.k_proj.": ".attn.wk_dv.",
    ".self_attn.v_proj.": ".attn.wv_dv.",
    ".self_attn.r_proj.": ".attn.wr_du.",
    ".self_attn.o_proj.": ".attn.wo_ud.",
    ".self_attn.": ".attn.",
    ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".gate.e_score_correction_bias": ".gate.bias",
    ".shared_experts.gate_proj": ".shared_experts.shared_w13_weight",
    ".shared_experts.up_proj": ".shared_experts.shared_w13_weight",
    ".shared_experts.down_proj": ".shared_experts.shared_w2_weight",
    ".experts.gate_up_proj": ".experts.w13_weight",
    ".experts.down_proj": ".experts.w2_weight",
    ".mlp.gate_proj.": ".mlp.w13_dn.",
    ".mlp.up_proj.": ".mlp.w13_dn.",
    ".mlp.down_proj.": ".mlp.w2_md.",
}
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "max_position_embeddings": 131_072,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SUPPORTED = {"shared_expert_sink": True, "tie_word_embeddings": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class InklingConfig(MoEConfig):
    """The config of Inkling. `vocab_size` is the number of tokens that are scored."""

    stored_vocab_size: int  # rows of the stored embedding and head; padding after `vocab_size`
    kernel_size: int  # of all convolutions
    choose: SharedSigmoidTopK
    hidden_divisor: float  # of the input of the vocabulary head

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(
            self.attention, kv_dtype=kv_dtype, has_unified_kv=self.has_unified_kv
        )
        for attention in dict.fromkeys(self.attention):
            has_state = [other == attention for other in self.attention]
            windows = format_of_windows(attention, self.kernel_size)
            spec = with_states_in(spec, has_state, CONVOLUTIONS, windows)
        return spec


class InklingForCausalLM(MoEDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/inkling."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> InklingConfig:
        hf_config = with_defaults(with_main_names(hf_config, _MAIN_NAMES), _DEFAULTS)
        refuse_other_values(hf_config, _SUPPORTED)
        hf_config = _with_widths_of_parts(hf_config)
        fields = read_dense_fields(hf_config)
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=256,
            default_top_k=6,
            default_size=3072,
        )
        stored = fields["vocab_size"]
        scored = read_count(hf_config, "unpadded_vocab_size", stored)
        num_dense = read_count(hf_config, "dense_mlp_idx", 0, minimum=0)
        leading_dense = [layer_idx >= num_dense for layer_idx in range(fields["num_layers"])]
        return InklingConfig(
            **fields | {"vocab_size": min(scored, stored)},
            **experts,
            attention=_read_attention(hf_config, fields),
            has_experts=read_mlp_layer_types(hf_config, leading_dense),
            stored_vocab_size=stored,
            kernel_size=read_count(hf_config, "conv_kernel_size", 4, minimum=2),
            choose=SharedSigmoidTopK(
                top_k=experts["num_experts_per_tok"],
                num_shared=read_count(hf_config, "n_shared_experts", 2),
                factor=read_number(hf_config, "route_scale", 8.0),
            ),
            hidden_divisor=read_number(hf_config, "logits_mup_width_multiplier", 24.0),
        )

    def __init__(self, config: InklingConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(RMSNorm, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config,
            layer=functools.partial(
                ConvolvedLayer, hidden_size=config.hidden_size, kernel_size=config.kernel_size
            ),
            attention=functools.partial(
                RelativeAttention, kernel_size=config.kernel_size, norm=norm, dtype=dtype
            ),
            mlp=TrainedScaleMLP,
            sparse_mlp=functools.partial(_make_sparse_mlp, config, dtype),
            norm=norm,
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )
        self.embed_norm = norm(config.hidden_size)

    def embed(self, context: LayerContext) -> Carry:
        """See `Decoder.embed`. Embeddings from step features are not normed."""
        hidden = self.embed_norm(self.embed_tokens(context.batch.token_ids))
        if context.embeddings is not None:
            hidden = context.embeddings.replace_in(hidden)
        return Carry(hidden=hidden)

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return super().compute_logits(hidden / self.config.hidden_divisor, kernels)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints pack all experts of a layer, and likewise its shared experts.

        Checkpoints with a vision part have the hub's form: other names of tensors, and alternating
        rows of gate and up.
        """
        config = self.config
        is_of_hub = config.has_other_parts
        rules = packed_gate_up_rules(super().weight_rules(), is_interleaved=is_of_hub)
        rules = packed_shared_rules(rules, config.choose.num_shared)
        for name in ("embed_tokens.embedding", "lm_head.kernel"):
            (source,) = rules[name].sources
            stored = replace(source, shape=(config.stored_vocab_size, config.hidden_size))
            take = functools.partial(_leading_rows, num_rows=config.vocab_size)
            rules[name] = replace(rules[name], sources=(stored,), combine=take)
        names = {"model.embed_norm.": "model.embed_tokens.embed_norm."}
        if is_of_hub:
            rules = {name: _interleaved(name, rule) for name, rule in rules.items()}
            names |= _HUB_NAMES
        return with_stored_names(rules, names)

    def ignores_weight(self, name: str) -> bool:
        # Layers for multi-token prediction.
        return name.startswith("model.mtp.")


def _leading_rows(weights_np: Sequence[np.ndarray], *, num_rows: int) -> np.ndarray:
    (weight_np,) = weights_np
    return weight_np[:num_rows]


def _interleaved(name: str, rule: WeightRule) -> WeightRule:
    """The rule for a tensor in which rows of gate and up alternate; other rules are unchanged.

    `packed_gate_up_rules` has already changed the rules of experts that the router chooses.
    """
    match = re.search(r"\.mlp\.(?:shared_experts\.)?(gate|up)_proj\.kernel$", name)
    if match is None:
        return rule
    (own,) = rule.sources
    *outer, num_rows, width = own.shape
    start = int(match[1] == "up")

    def combine(weights_np: Sequence[np.ndarray]) -> np.ndarray:
        return rule.combined([weights_np[0][..., start::2, :]])

    source = replace(own, shape=(*outer, 2 * num_rows, width))
    return replace(rule, sources=(source,), combine=combine)


def _make_sparse_mlp(config: InklingConfig, dtype: jnp.dtype) -> ScoredSharedMLP:
    num_shared = config.choose.num_shared
    return ScoredSharedMLP(
        gate=SharedScoresRouter(config.hidden_size, config.num_experts, num_shared),
        choose=config.choose,
        experts=make_experts(config, dtype=dtype),
        shared_experts=SharedExperts(
            config.hidden_size,
            num_shared * config.moe_intermediate_size,
            activation=config.hidden_act,
            dtype=dtype,
        ),
    )


def _with_widths_of_parts(hf_config: Mapping[str, object]) -> Mapping[str, object]:
    """The fields with the width of dense MLPs in `intermediate_size`.

    If config.json has `dense_intermediate_size`, its `intermediate_size` is the width of experts.
    """
    dense = hf_config.get("dense_intermediate_size")
    if dense is None:
        return hf_config
    of_experts = read_count(hf_config, "intermediate_size")
    return {**hf_config, "intermediate_size": dense, "moe_intermediate_size": of_experts}


def _read_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[RelativeAttentionConfig, ...]:
    window = read_count(hf_config, "sliding_window_size", 512)

    def read(prefix: str, num_kv_heads: int, **others: object) -> RelativeAttentionConfig:
        head_dim = read_count(hf_config, f"{prefix}head_dim", 128)
        return RelativeAttentionConfig(
            hidden_size=fields["hidden_size"],
            num_q_heads=read_count(hf_config, f"{prefix}num_attention_heads", 64),
            num_kv_heads=read_count(hf_config, f"{prefix}num_key_value_heads", num_kv_heads),
            head_dim=head_dim,
            rope=RopeConfig(),
            has_positions=False,
            scale=1 / head_dim,
            num_profiles=read_count(hf_config, "d_rel", 16),
            **others,
        )

    log_scale = {}
    if hf_config.get("log_scaling_n_floor") is not None:
        log_scale = {
            "log_floor": read_count(hf_config, "log_scaling_n_floor"),
            "log_rate": read_number(hf_config, "log_scaling_alpha", 0.1),
        }
    num_distances = read_count(hf_config, "rel_extent", 1024)
    sliding = read("swa_", 16, num_distances=window)
    by_type = {
        _FULL: read("", 8, num_distances=num_distances, **log_scale),
        _SLIDING: with_window(sliding, window, fields["max_position_embeddings"]),
    }
    return tuple(by_type[name] for name in _read_layer_types(hf_config, fields["num_layers"]))


def _read_layer_types(hf_config: Mapping[str, object], num_layers: int) -> Sequence[str]:
    """The type of each layer: from `layer_types`, else from the numbers of sliding layers.

    Raises:
        ModelConfigError: `layer_types` is not a list with a known name for each layer.
    """
    types = hf_config.get("layer_types")
    if types is None:
        sliding = read_layer_numbers(hf_config, "local_layer_ids")
        if sliding is None:
            sliding = [layer_idx for layer_idx in range(num_layers) if (layer_idx + 1) % 6]
        return [_SLIDING if layer_idx in sliding else _FULL for layer_idx in range(num_layers)]
    known = (_FULL, _SLIDING)
    is_list = isinstance(types, list) and len(types) == num_layers
    if not is_list or any(name not in known for name in types):
        raise ModelConfigError(
            f"config.json: layer_types is {types!r}; expected a list of {num_layers} names, one "
            f"for each layer, of {', '.join(known)}."
        )
    return types
