"""Nemotron-H and Nemotron 3: layers that are Mamba2, attention, an MLP or experts alone.

Attention has no positions. Experts have no gate; in some releases they read a narrower latent.
"""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, refuse_other_values, with_defaults
from models.config.moe_config import MoEConfig, read_corrected_choice, read_expert_fields
from models.config.rope_config import RopeConfig
from models.config.state_layers import read_state_dtype
from models.decoder_spec import DecoderSpec, with_states_in
from models.decoders.decoder import Decoder
from models.decoders.layer_loop import Layer
from models.errors import ModelConfigError
from models.forward.layer_context import LayerContext
from models.layers.attention import Attention
from models.layers.experts import PlainExperts
from models.layers.linear import Linear
from models.layers.mamba2 import MAMBA, Mamba2, Mamba2Config, read_time_step_limit
from models.layers.mixer_layer import MixerLayer, MLPLayer
from models.layers.mlp import MLP, PlainMLP
from models.layers.rms_norm import RoundedLastRMSNorm
from models.layers.routing import CorrectedRouter, SigmoidTopK
from models.layers.sparse_mlp import SparseMLP
from models.weight_rule import WeightRule, with_stored_names

Part = Literal["mamba", "attention", "mlp", "moe"]
# Names in config.json, and letters of `hybrid_override_pattern`.
_PARTS: dict[str, Part] = {
    "linear_attention": "mamba",
    "mamba": "mamba",
    "M": "mamba",
    "full_attention": "attention",
    "attention": "attention",
    "*": "attention",
    "mlp": "mlp",
    "-": "mlp",
    "moe": "moe",
    "E": "moe",
}
# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "intermediate_size": 21_504,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Older names of fields -> names today.
_OLDER_FIELDS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_limit": "time_step_limit",
    "mamba_conv_bias": "use_conv_bias",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class NemotronHConfig(MoEConfig):
    """The config of Nemotron-H.

    Args:
        parts: Of each layer.
        shared_intermediate_size: Inner width of the shared expert.
        latent_size: Width of what experts read and write; None is the hidden size.
    """

    parts: tuple[Part, ...]
    mamba: Mamba2Config
    choose: SigmoidTopK
    shared_intermediate_size: int
    latent_size: int | None
    mlp_bias: bool

    @property
    def expert_hidden_size(self) -> int:
        """Width of what experts read and write."""
        return self.hidden_size if self.latent_size is None else self.latent_size

    def spec(self, kv_dtype: str) -> DecoderSpec:
        has_state = [part == "mamba" for part in self.parts]
        spec = MoEConfig.spec(self, kv_dtype)
        return with_states_in(spec, has_state, MAMBA, self.mamba.format())


class NemotronHForCausalLM(Decoder):
    """Source: arXiv:2504.03624."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> NemotronHConfig:
        hf_config = with_defaults(_with_newer_fields(hf_config), _DEFAULTS)
        refuse_other_values(
            hf_config,
            {
                "attention_bias": False,
                "mamba_hidden_act": "silu",
                "mamba_proj_bias": False,
                "n_shared_experts": 1,
                "sliding_window": None,
            },
        )
        parts = _read_parts(hf_config)
        hf_config |= {
            "num_hidden_layers": len(parts),
            "rms_norm_eps": hf_config["layer_norm_epsilon"],
        }
        fields = read_dense_fields(
            hf_config, activation_field="mlp_hidden_act", default_activation="relu2"
        )
        experts = read_expert_fields(
            hf_config,
            num_experts_fields=("n_routed_experts", "num_local_experts"),
            default_num_experts=8,
            default_top_k=2,
            default_size=7688,
        )
        heads = read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128)
        attention = AttentionConfig(**heads, rope=RopeConfig(), has_positions=False)
        has_latent = hf_config.get("moe_latent_size") is not None
        return NemotronHConfig(
            **fields,
            **experts,
            attention=tuple(attention if part == "attention" else None for part in parts),
            parts=parts,
            has_experts=tuple(part == "moe" for part in parts),
            choose=read_corrected_choice(hf_config, experts),
            shared_intermediate_size=read_count(
                hf_config, "moe_shared_expert_intermediate_size", 7688
            ),
            latent_size=read_count(hf_config, "moe_latent_size") if has_latent else None,
            mlp_bias=read_flag(hf_config, "mlp_bias"),
            mamba=Mamba2Config(
                hidden_size=fields["hidden_size"],
                num_heads=read_count(hf_config, "mamba_num_heads", 128),
                head_dim=read_count(hf_config, "mamba_head_dim", 64),
                state_size=read_count(hf_config, "ssm_state_size", 128),
                num_groups=read_count(hf_config, "n_groups", 8),
                kernel_size=read_count(hf_config, "conv_kernel", 4),
                eps=fields["rms_norm_eps"],
                use_bias=read_flag(hf_config, "use_bias"),
                use_conv_bias=read_flag(hf_config, "use_conv_bias", True),
                time_step_limit=read_time_step_limit(hf_config),
                state_dtype=read_state_dtype(hf_config, "mamba_ssm_cache_dtype"),
            ),
        )

    def __init__(self, config: NemotronHConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        norm = functools.partial(
            RoundedLastRMSNorm, config.hidden_size, eps=config.rms_norm_eps, dtype=dtype
        )
        layers = zip(config.parts, config.attention, strict=True)
        super().__init__(
            config,
            layers=[_make_layer(config, *layer, norm=norm, dtype=dtype) for layer in layers],
            norm=norm(),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
        )

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for the embedding and the last norm."""
        names = {"model.embed_tokens.": "model.embeddings.", "model.norm.": "model.norm_f."}
        return with_stored_names(super().weight_rules(), names)

    def name_weight(self, name: str) -> str:
        """Checkpoints on the hub have the layers in `backbone`."""
        return re.sub(r"^backbone\.", "model.", name)

    def ignores_weight(self, name: str) -> bool:
        """Layers for multi-token prediction are not loaded."""
        return name.startswith("mtp.")


class PlainSharedExpertsMLP(SparseMLP):
    """Experts without gates, possibly between two projections, and a shared MLP for every row."""

    def __init__(self, config: NemotronHConfig, *, dtype: jnp.dtype) -> None:
        """Makes the block with weights to be filled in."""
        hidden_size, width = config.hidden_size, config.expert_hidden_size
        super().__init__(
            gate=CorrectedRouter(hidden_size, config.num_experts),
            choose=config.choose,
            experts=PlainExperts(
                config.num_experts,
                width,
                config.moe_intermediate_size,
                activation=config.hidden_act,
                dtype=dtype,
            ),
        )
        self.shared_experts = _make_mlp(config, config.shared_intermediate_size, dtype)
        linear = functools.partial(Linear, use_bias=config.mlp_bias, dtype=dtype)
        is_narrow = config.latent_size is not None
        self.fc1_latent_proj = linear(hidden_size, width) if is_narrow else None
        self.fc2_latent_proj = linear(width, hidden_size) if is_narrow else None

    def __call__(
        self,
        x: jax.Array,  # f[num_rows, hidden], of the tokens of `context.of_rows`
        context: LayerContext,
    ) -> jax.Array:  # f[num_rows, hidden]
        routing = self.gate.route(x, self.choose)
        if self.fc1_latent_proj is None:
            out = self.experts(x, routing, context)
        else:
            narrow = self.experts(self.fc1_latent_proj(x, context), routing, context)
            out = self.fc2_latent_proj(narrow, context)
        return out + self.shared_experts(x, context)


def _make_layer(
    config: NemotronHConfig,
    part: Part,
    attention: AttentionConfig | None,
    *,
    norm: functools.partial[nnx.Module],
    dtype: jnp.dtype,
) -> Layer:
    if part == "mamba":
        return MixerLayer(mixer=Mamba2(config.mamba, dtype=dtype), norm=norm)
    if part == "attention":
        return MixerLayer(mixer=Attention(attention, dtype=dtype), norm=norm)
    if part == "moe":
        return MLPLayer(mixer=PlainSharedExpertsMLP(config, dtype=dtype), norm=norm)
    return MLPLayer(mixer=_make_mlp(config, config.intermediate_size, dtype), norm=norm)


def _make_mlp(config: NemotronHConfig, intermediate_size: int, dtype: jnp.dtype) -> MLP:
    return PlainMLP(
        config.hidden_size,
        intermediate_size,
        activation=config.hidden_act,
        use_bias=config.mlp_bias,
        dtype=dtype,
    )


def _with_newer_fields(hf_config: Mapping[str, object]) -> dict[str, object]:
    renamed = {_OLDER_FIELDS.get(name, name): value for name, value in hf_config.items()}
    older = {new: hf_config[old] for old, new in _OLDER_FIELDS.items() if old in hf_config}
    return renamed | older


def _read_parts(hf_config: Mapping[str, object]) -> tuple[Part, ...]:
    """The part of each layer, from a list of names or from a string of letters."""
    fields = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    name = next((name for name in fields if hf_config.get(name) is not None), None)
    if name is None:
        return "mamba", "moe", "attention", "mlp"
    written = hf_config[name]
    parts = [_PARTS.get(part) if isinstance(part, str) else None for part in _as_list(written)]
    if not parts or None in parts:
        raise ModelConfigError(
            f"config.json: {name} is {written!r}; expected a part for each layer, of "
            f"{', '.join(_PARTS)}."
        )
    return tuple(parts)


def _as_list(written: object) -> list[object]:
    return list(written) if isinstance(written, list | str) else []
