"""OLMo Hybrid: Gated DeltaNet in place of OLMo 3's attention in three layers of four."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_attention, read_dense_fields
from models.config.fields import read_count, read_flag, with_defaults
from models.config.state_layers import read_has_state
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.dense_decoder import DenseDecoder
from models.decoders.layer_loop import Layer
from models.layers.decoder_layers import PreNormLayer
from models.layers.dense_layers import make_joint_normed_attention
from models.layers.gated_delta_net import LINEAR_ATTENTION, GatedDeltaNet, GatedDeltaNetConfig
from models.layers.mixer_rules import with_renamed_mixers
from models.layers.residual_layers import PostNormLayer
from models.layers.rms_norm import RoundedLastJoinedHeadsRMSNorm, RoundedLastRMSNorm
from models.layers.self_attention import SelfAttention
from models.weight_rule import Source, WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"eos_token_id": 100_257}
# Of the norm of each head's output, in all releases.
_HEAD_EPS = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoHybridConfig(DenseConfig):
    """The config of OLMo Hybrid. Layers without attention have a `GatedDeltaNet`."""

    linear: GatedDeltaNetConfig

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, LINEAR_ATTENTION, self.linear.format())


class OlmoHybridForCausalLM(DenseDecoder):
    """Norms follow attention, and precede a `GatedDeltaNet`.

    Source: huggingface.co/docs/transformers/model_doc/olmo_hybrid.
    """

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> OlmoHybridConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config)
        num_layers = fields["num_layers"]
        attention = replace(
            read_attention(hf_config, fields, has_bias=read_flag(hf_config, "attention_bias")),
            has_positions=_has_positions(hf_config),
        )
        by_rule = [layer_idx % 4 != 3 for layer_idx in range(num_layers)]
        if all(by_rule):
            by_rule[-1] = False
        return OlmoHybridConfig(
            **fields,
            attention=tuple(
                None if has_state else attention
                for has_state in read_has_state(hf_config, by_rule, "linear_attention")
            ),
            linear=_read_linear(hf_config),
        )

    def __init__(
        self, config: OlmoHybridConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        eps = config.rms_norm_eps
        joint_norm = functools.partial(RoundedLastJoinedHeadsRMSNorm, eps=eps, dtype=dtype)

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return GatedDeltaNet(config.linear, dtype=dtype)
            return make_joint_normed_attention(attention, norm=joint_norm, dtype=dtype)

        super().__init__(
            config,
            layer=_make_layer,
            attention=make_mixer,
            norm=functools.partial(RoundedLastRMSNorm, eps=eps, dtype=dtype),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have a matrix for each projection of a `GatedDeltaNet`."""
        config = self.config
        rules = with_renamed_mixers(super().weight_rules(), config.attention, LINEAR_ATTENTION)
        for layer_idx, attention in enumerate(config.attention):
            if attention is None:
                _separate_projections(rules, f"layers.{layer_idx}.self_attn.", config.linear)
        mixer = f".{LINEAR_ATTENTION}."
        return with_stored_names(
            rules, {f"{mixer}norm.": f"{mixer}o_norm.", f"{mixer}out_proj.": f"{mixer}o_proj."}
        )

    def name_weight(self, name: str) -> str:
        """The hub has other names for the norms of layers with a `GatedDeltaNet`."""
        name = name.replace(".attention_layer_norm.", ".input_layernorm.")
        return name.replace(".feedforward_layer_norm.", ".post_attention_layernorm.")


def _make_layer(*, attention: SelfAttention, **parts: object) -> Layer:
    layer = PreNormLayer if isinstance(attention, GatedDeltaNet) else PostNormLayer
    return layer(attention=attention, **parts)


def _has_positions(hf_config: Mapping[str, object]) -> bool:
    """Whether attention has rotary embeddings. In releases, it has none: `rope_theta` is null."""
    rope = hf_config.get("rope_parameters")
    return not isinstance(rope, Mapping) or rope.get("rope_theta", True) is not None


def _read_linear(hf_config: Mapping[str, object]) -> GatedDeltaNetConfig:
    hidden_size = read_count(hf_config, "hidden_size")
    num_heads = read_count(hf_config, "num_attention_heads")
    num_k_heads = read_count(hf_config, "linear_num_key_heads", num_heads)
    k_dim = read_count(hf_config, "linear_key_head_dim", int(0.75 * hidden_size / num_k_heads))
    return GatedDeltaNetConfig(
        hidden_size=hidden_size,
        num_k_heads=num_k_heads,
        num_v_heads=read_count(hf_config, "linear_num_value_heads", num_heads),
        k_dim=k_dim,
        v_dim=read_count(hf_config, "linear_value_head_dim", 2 * k_dim),
        kernel_size=read_count(hf_config, "linear_conv_kernel_dim", 4),
        eps=_HEAD_EPS,
        max_beta=2.0 if read_flag(hf_config, "linear_allow_neg_eigval", True) else 1.0,
    )


def _separate_projections(
    rules: dict[str, WeightRule], prefix: str, config: GatedDeltaNetConfig
) -> None:
    """Replaces the rules of joined projections, and of the convolution, of one layer.

    Releases have a convolution for each of queries, keys and values. transformers joins them and
    writes three equal parts.
    """
    hidden = (config.hidden_size,)
    qkv = {"q": config.k_width, "k": config.k_width, "v": config.v_width}
    parts = {
        "in_proj_qkvz.kernel": ({**qkv, "g": config.v_width}, "proj", hidden),
        "in_proj_ba.kernel": ({"b": config.num_v_heads, "a": config.num_v_heads}, "proj", hidden),
        "conv1d.kernel": (qkv, "conv1d", (1, config.kernel_size)),
    }
    for name, (widths, kind, rest) in parts.items():
        rule = rules[prefix + name]
        owner = rule.sources[0].name.rpartition(".")[0].rpartition(".")[0]
        equal_parts = (sum(widths.values()) // len(widths), *rest)
        other_shapes = (equal_parts,) if kind == "conv1d" else ()
        sources = tuple(
            Source(
                name=f"{owner}.{part}_{kind}.weight",
                shape=(width, *rest),
                other_shapes=other_shapes,
            )
            for part, width in widths.items()
        )
        combine = functools.partial(_joined, rule=rule)
        rules[prefix + name] = replace(rule, sources=sources, combine=combine)


def _joined(weights_np: Sequence[np.ndarray], *, rule: WeightRule) -> np.ndarray:
    return rule.combined([np.concatenate(weights_np)])
