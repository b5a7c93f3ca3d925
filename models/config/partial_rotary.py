"""Reads which share of each head is turned, if it may be less than the whole head."""

from collections.abc import Mapping
from typing import Any

from models.config.attention_config import AttentionConfig
from models.config.fields import read_flag, read_number
from models.config.rope_config import RopeConfig, parse_rope_config
from models.errors import UnsupportedModelError

_FACTOR = "partial_rotary_factor"
_HOLDERS = ("rope_scaling", "rope_parameters")


def parse_partial_rope(
    hf_config: Mapping[str, object], max_position_embeddings: int, *, default_factor: float
) -> tuple[RopeConfig, float]:
    """Reads one embedding for all layers, and which share of each head it turns.

    Raises: As `parse_rope_config`, and `UnsupportedModelError` for the kind "proportional", which
        has another meaning of the share.
    """
    rope = parse_rope_config(without_rotary_factor(hf_config), max_position_embeddings)
    _check_kind(rope, hf_config)
    return rope, read_rotary_factor(hf_config, default_factor)


def read_rotary_factor(hf_config: Mapping[str, object], default: float) -> float:
    """Reads which share of a head is turned, from both generations of config.json.

    As in transformers, the factor among the rope parameters wins over a top-level one.

    Raises:
        ModelConfigError: It is not a positive number.
    """
    # Where both spellings are present the older wins, as in `parse_rope_config`.
    holders = [hf_config[name] for name in _HOLDERS if hf_config.get(name)]
    default = read_number(hf_config, _FACTOR, default)
    if holders and isinstance(holders[0], Mapping):
        return read_number(holders[0], _FACTOR, default)
    return default


def read_rotary_factor_of_type(hf_config: Mapping[str, object], layer_type: str) -> float:
    """Reads which share of a head is turned in layers of a type, from `rope_parameters`.

    Raises:
        ModelConfigError: It is not a positive number.
    """
    by_type = hf_config.get("rope_parameters")
    fields = by_type.get(layer_type) if isinstance(by_type, Mapping) else None
    return read_number(fields, _FACTOR, 1.0) if isinstance(fields, Mapping) else 1.0


def attention_of_ropes(
    hf_config: Mapping[str, object],
    heads: Mapping[str, Any],
    *,
    full_rope: RopeConfig,
    sliding_rope: RopeConfig,
) -> tuple[AttentionConfig, AttentionConfig]:
    """Attention of full and of sliding layers, each with its embedding and share of turned heads.

    Biases of all projections follow `attention_bias`.

    Args:
        heads: Further fields of both, such as the result of `read_head_fields`.

    Raises:
        UnsupportedModelError: As in `parse_partial_rope`.
    """
    for rope in (full_rope, sliding_rope):
        _check_kind(rope, hf_config)
    has_bias = read_flag(hf_config, "attention_bias")
    full, sliding = (
        AttentionConfig(
            **heads,
            rope=rope,
            rotary_dim=int(heads["head_dim"] * read_rotary_factor_of_type(hf_config, layer_type)),
            qkv_bias=has_bias,
            out_bias=has_bias,
        )
        for layer_type, rope in (("full_attention", full_rope), ("sliding_attention", sliding_rope))
    )
    return full, sliding


def _check_kind(rope: RopeConfig, hf_config: Mapping[str, object]) -> None:
    if rope.kind == "proportional":
        raise UnsupportedModelError(
            "config.json: rope type 'proportional' is not supported for "
            f"{hf_config['architectures'][0]}, which rotates the leading dimensions of each head. "
            "Use another rope type."
        )


def without_rotary_factor(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json for `parse_rope_config`, which refuses the factor if it is not read.

    For `parse_ropes_by_layer_type` too.
    """
    return {
        name: _without_factors(value) if name in _HOLDERS else value
        for name, value in hf_config.items()
        if name != _FACTOR
    }


def _without_factors(fields: object) -> object:
    """Rope parameters without the factor, also in the object of each layer type."""
    if not isinstance(fields, Mapping):
        return fields
    return {name: _without_factors(value) for name, value in fields.items() if name != _FACTOR}
