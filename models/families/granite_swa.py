"""Granite with sliding windows: three sliding-window layers to one full layer, attention sinks, and
a base of the rotary embedding per layer.
"""

import dataclasses
from collections.abc import Mapping

from models.config.attention_config import AttentionConfig
from models.config.fields import with_defaults
from models.config.layer_types import attention_by_type, read_sliding_window
from models.config.rope_config import parse_rope_config
from models.errors import ModelConfigError
from models.families.granite import (
    GraniteConfig,
    GraniteForCausalLM,
    read_granite_fields,
    read_granite_head_fields,
)

# Defaults of fields that a config.json may leave out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "bos_token_id": 100257, "eos_token_id": 100257}


class GraniteSWAForCausalLM(GraniteForCausalLM):
    """By default, every fourth layer is full, from the first one on."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> GraniteConfig:
        hf_config = with_defaults(hf_config, _DEFAULTS)
        fields = read_granite_fields(hf_config, default_tie_word_embeddings=True)
        attention = read_granite_swa_attention(hf_config, fields, default_num_kv_heads=4)
        return GraniteConfig(**fields, attention=attention)


def read_granite_swa_attention(
    hf_config: Mapping[str, object],
    fields: Mapping[str, object],
    *,
    default_num_kv_heads: int | None = None,
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer.

    Args:
        fields: The result of `read_granite_fields` or of `read_granite_moe_fields`.
        default_num_kv_heads: As in `read_head_fields`.
    """
    num_layers, max_positions = fields["num_layers"], fields["max_position_embeddings"]
    full = AttentionConfig(
        **read_granite_head_fields(hf_config, default_num_kv_heads=default_num_kv_heads),
        rope=parse_rope_config(hf_config, max_positions),
        has_sinks=True,
    )
    attention = attention_by_type(
        hf_config,
        [layer_idx % 4 != 0 for layer_idx in range(num_layers)],
        full=full,
        sliding=full,
        window=read_sliding_window(hf_config, default=128),
        max_position_embeddings=max_positions,
    )
    return with_layer_thetas(hf_config, attention)


def with_layer_thetas(
    hf_config: Mapping[str, object], attention: tuple[AttentionConfig, ...]
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer with its base in `layer_rope_theta`: 0 means no positions.

    Raises:
        ModelConfigError: As `read_layer_thetas`.
    """
    thetas = read_layer_thetas(hf_config, len(attention))
    if thetas is None:
        return attention
    return tuple(
        dataclasses.replace(layer, rope=dataclasses.replace(layer.rope, theta=float(theta)))
        if theta
        else dataclasses.replace(layer, has_positions=False)
        for layer, theta in zip(attention, thetas, strict=True)
    )


def read_layer_thetas(hf_config: Mapping[str, object], num_layers: int) -> list[float] | None:
    """Reads `layer_rope_theta`, a number for each layer; None if it is missing or null.

    Raises:
        ModelConfigError: `layer_rope_theta` is not a list of one number per layer.
    """
    thetas = hf_config.get("layer_rope_theta")
    if thetas is None:
        return None
    if (
        not isinstance(thetas, list)
        or len(thetas) != num_layers
        or any(not isinstance(theta, int | float) or theta < 0 for theta in thetas)
    ):
        raise ModelConfigError(
            f"config.json: layer_rope_theta is {thetas!r}; expected a list of {num_layers} "
            "numbers, 0 for each layer without positions."
        )
    return thetas
