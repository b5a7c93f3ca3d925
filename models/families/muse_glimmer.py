"""Muse Glimmer, its language model: gated attention, normed embeddings, four norms per layer, and a
soft cap of logits. Three sliding-window layers to one full layer without positions.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from models.config.attention_config import AttentionConfig
from models.config.dense_config import DenseConfig, read_dense_fields, read_head_fields
from models.config.fields import read_flag, read_number, with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_rope_config
from models.decoders.decoder import Decoder
from models.decoders.layer_loop import Layer
from models.families.granite_swa import read_layer_thetas
from models.forward.carry import Carry
from models.forward.kernel_settings import KernelSettings
from models.forward.layer_context import LayerContext
from models.layers.dense_layers import make_dense_layers, make_head_normed_attention
from models.layers.gated_attention import GatedAttention
from models.layers.output_norm_layer import OutputNormLayer
from models.layers.rms_norm import OffsetRMSNorm, RoundedLastRMSNorm, UnscaledRMSNorm
from models.layers.soft_cap import soft_cap_logits

# Defaults of fields that a config.json may leave out.
MUSE_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "post_norm_eps": 1e-8,
    "final_logit_softcapping": 20.0,
    "bos_token_id": 200_000,
    "eos_token_id": 200_001,
}
_DEFAULTS = MUSE_DEFAULTS | {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "qk_scale_factor": 3.87,
    "output_multiplier": 0.19611613513818404,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MuseGlimmerConfig(DenseConfig):
    """The config of Muse Glimmer."""

    post_norm_eps: float  # of the norms of outputs
    logits_scale: float  # factor of logits
    logits_soft_cap: float


class MuseDecoder(Decoder):
    """A decoder with normed embeddings, and with a factor and a soft cap of logits."""

    def __init__(
        self,
        config: DenseConfig,
        *,
        layers: Sequence[Layer],
        has_head_kernel: bool,
        dtype: jnp.dtype,
    ) -> None:
        """Makes the model with weights to be filled in.

        Args:
            config: It also has the fields that `read_muse_numbers` reads.
            layers: As in `Decoder.__init__`; so is `has_head_kernel`.
        """
        norm = RoundedLastRMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        super().__init__(
            config, layers=layers, norm=norm, has_head_kernel=has_head_kernel, dtype=dtype
        )
        self.embed_norm = UnscaledRMSNorm(eps=config.rms_norm_eps)

    def embed(self, context: LayerContext) -> Carry:
        carry = super().embed(context)
        return dataclasses.replace(carry, hidden=self.embed_norm(carry.hidden))

    def compute_logits(
        self,
        hidden: jax.Array,  # f[num_logits, hidden]
        kernels: KernelSettings,
    ) -> jax.Array:  # f32[num_logits, vocab]
        logits = super().compute_logits(hidden, kernels) * self.config.logits_scale
        return soft_cap_logits(logits, self.config.logits_soft_cap)


class MuseGlimmerForCausalLM(MuseDecoder):
    """Source: huggingface.co/docs/transformers/model_doc/muse_glimmer."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> MuseGlimmerConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_dense_fields(hf_config, activation_field="hidden_activation")
        attention = read_muse_attention(hf_config, fields)
        return MuseGlimmerConfig(**fields, **read_muse_numbers(hf_config), attention=attention)

    def __init__(
        self, config: MuseGlimmerConfig, *, has_head_kernel: bool, dtype: jnp.dtype
    ) -> None:
        out_norm = functools.partial(
            OffsetRMSNorm, config.hidden_size, eps=config.post_norm_eps, dtype=dtype
        )
        layers = make_dense_layers(
            config,
            layer=functools.partial(
                OutputNormLayer, attention_out_norm=out_norm, mlp_out_norm=out_norm
            ),
            attention=functools.partial(
                make_head_normed_attention,
                norm=lambda num_features: UnscaledRMSNorm(eps=config.rms_norm_eps),
                attention=functools.partial(GatedAttention, gate=jax.nn.sigmoid),
                dtype=dtype,
            ),
            norm=functools.partial(OffsetRMSNorm, eps=config.rms_norm_eps, dtype=dtype),
            dtype=dtype,
        )
        super().__init__(config, layers=layers, has_head_kernel=has_head_kernel, dtype=dtype)


def read_muse_numbers(hf_config: Mapping[str, object]) -> dict[str, float]:
    """Reads the fields of `MuseGlimmerConfig` that `DenseConfig` does not have."""
    return {
        "post_norm_eps": read_number(hf_config, "post_norm_eps"),
        "logits_scale": read_number(hf_config, "output_multiplier"),
        "logits_soft_cap": read_number(hf_config, "final_logit_softcapping"),
    }


def read_muse_attention(
    hf_config: Mapping[str, object], fields: Mapping[str, object]
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer. Every fourth layer is full, counted from the last one.

    `layer_rope_theta` says which layers have positions. Its numbers other than 0 are not used: in
    transformers, these layers have the rotary embedding of `rope_parameters`.

    Args:
        fields: The result of `read_dense_fields`.
    """
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    heads = read_head_fields(hf_config)
    has_bias = read_flag(hf_config, "attention_bias")
    full = AttentionConfig(
        # The normed queries have a further factor.
        **heads | {"scale": heads["scale"] * read_number(hf_config, "qk_scale_factor")},
        rope=parse_rope_config(hf_config, max_positions),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )
    is_sliding = [(num_layers - 1 - layer_idx) % 4 != 0 for layer_idx in range(num_layers)]
    layers = attention_by_type(
        hf_config,
        is_sliding,
        full=full,
        sliding=full,
        window=read_sliding_window(hf_config, default=2048),
        max_position_embeddings=max_positions,
    )
    has_positions = read_layer_thetas(hf_config, num_layers) or is_sliding
    return tuple(
        dataclasses.replace(layer, has_positions=bool(is_placed))
        for layer, is_placed in zip(layers, has_positions, strict=True)
    )
