"""RecurrentGemma: linear recurrent units in two layers of three, and attention with windows."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_count, read_flag, read_number, with_defaults
from models.config.partial_rotary import parse_partial_rope
from models.decoder_spec import DecoderSpec, spec_of_attention, with_states
from models.decoders.decoder import Decoder
from models.errors import ModelConfigError
from models.forward.kernel_settings import KernelSettings
from models.layers.attention import Attention
from models.layers.dense_layers import make_dense_layers
from models.layers.rg_lru import RECURRENT, RecurrentBlock, RecurrentBlockConfig
from models.layers.rms_norm import OffsetRMSNorm
from models.layers.self_attention import SelfAttention
from models.layers.soft_cap import soft_cap_logits
from models.weight_rule import WeightRule, with_stored_names

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {
    # config.json names no limit; the models were trained on this many tokens. The host keeps the
    # tokens of running requests in arrays of this length.
    "max_position_embeddings": 8192,
    "intermediate_size": 7680,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "block_types": ["recurrent", "recurrent", "attention"],
}
# Names of modules here, and in checkpoints.
_STORED_NAMES = {
    ".self_attn.": ".temporal_block.",
    ".input_layernorm.": ".temporal_pre_norm.",
    ".post_attention_layernorm.": ".channel_pre_norm.",
    ".mlp.": ".mlp_block.",
    "model.norm.": "model.final_norm.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentGemmaConfig(DenseConfig):
    """The config of RecurrentGemma. Layers without attention have a `RecurrentBlock`."""

    recurrent: RecurrentBlockConfig
    logits_soft_cap: float

    def spec(self, kv_dtype: str) -> DecoderSpec:
        spec = spec_of_attention(self.attention, kv_dtype=kv_dtype)
        return with_states(spec, RECURRENT, self.recurrent.format())


class RecurrentGemmaForCausalLM(Decoder):
    """Source: arXiv:2404.07839."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> RecurrentGemmaConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(
            hf_config,
            activation_field="hidden_activation",
            default_activation="gelu_pytorch_tanh",
            default_tie_word_embeddings=True,
        )
        # `intermediate_size` in config.json is the width of gate and up together.
        fields["intermediate_size"] //= 2
        hidden_size = fields["hidden_size"]
        heads = read_head_fields(hf_config)
        rope, factor = parse_partial_rope(
            hf_config, fields["max_position_embeddings"], default_factor=0.5
        )
        window_field = "attention_window_size"
        if hf_config.get(window_field) is None:
            window_field = "sliding_window"
        attention = AttentionConfig(
            **heads,
            rope=rope,
            rotary_dim=int(heads["head_dim"] * factor),
            qkv_bias=read_flag(hf_config, "attention_bias"),
            out_bias=True,
            sliding_window=read_count(hf_config, window_field, 2048),
        )
        width = read_count(hf_config, "lru_width", hidden_size)
        if width % heads["num_q_heads"]:
            raise ModelConfigError(
                f"config.json: lru_width is {width}; expected a multiple of num_attention_heads, "
                f"{heads['num_q_heads']}, because gates are computed within as many blocks."
            )
        return RecurrentGemmaConfig(
            **fields,
            attention=tuple(
                attention if has_attention else None
                for has_attention in _read_has_attention(hf_config, fields["num_layers"])
            ),
            recurrent=RecurrentBlockConfig(
                hidden_size=hidden_size,
                width=width,
                num_blocks=heads["num_q_heads"],
                kernel_size=read_count(hf_config, "conv1d_width", 4),
                activation=fields["hidden_act"],
            ),
            logits_soft_cap=read_number(hf_config, "logits_soft_cap", 30.0),
        )

    def __init__(
        self, config: RecurrentGemmaConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        norm = functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype)

        def make_mixer(attention: AttentionConfig | None) -> SelfAttention:
            if attention is None:
                return RecurrentBlock(config.recurrent, dtype=dtype)
            return Attention(attention, dtype=dtype)

        super().__init__(
            config,
            layers=make_dense_layers(
                config, attention=make_mixer, mlp_bias=True, norm=norm, dtype=dtype
            ),
            norm=norm(config.hidden_size),
            has_head_kernel=has_head_kernel,
            dtype=dtype,
            # transformers rounds it to bfloat16, whatever the model's dtype is.
            embedding_scale=float(np.asarray(config.hidden_size**0.5, jnp.bfloat16)),
        )

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        return soft_cap_logits(super().compute_logits(hidden, kernels), self.config.logits_soft_cap)

    def weight_rules(self) -> dict[str, WeightRule]:
        """Checkpoints have other names for most modules."""
        return with_stored_names(super().weight_rules(), _STORED_NAMES)


def _read_has_attention(hf_config: Mapping[str, object], num_layers: int) -> list[bool]:
    """For each layer, whether it has attention. The list `block_types` repeats over the layers."""
    types = hf_config["block_types"]
    if (
        not isinstance(types, list | tuple)
        or not types
        or any(name not in ("recurrent", "attention") for name in types)
    ):
        raise ModelConfigError(
            f"config.json: block_types is {types!r}; expected a list of names, 'recurrent' or "
            "'attention', which repeats over the layers."
        )
    return [types[layer_idx % len(types)] == "attention" for layer_idx in range(num_layers)]
