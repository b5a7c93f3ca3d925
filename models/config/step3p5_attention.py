"""The attention of Step 3.5's layers, as the hub and as transformers 5 write it in config.json."""

import dataclasses
from collections.abc import Mapping, Sequence

from models.config.attention_config import AttentionConfig
from models.config.dense_config import read_head_fields
from models.config.fields import read_count, read_number, read_object, refuse_other_values
from models.config.layer_overrides import read_layer_overrides
from models.config.layer_types import (
    LayerType,
    attention_by_type,
    read_layer_types,
    read_sliding_window,
)
from models.config.partial_rotary import attention_of_ropes, without_rotary_factor
from models.config.rope_config import parse_ropes_by_layer_type
from models.config.step3p5_fields import bad_list
from models.errors import UnsupportedModelError

_ROPE_FIELDS_OF_HUB = ("partial_rotary_factors", "rope_scaling", "rope_theta")


def read_step_attention(
    hf_config: Mapping[str, object], num_layers: int, max_positions: int
) -> tuple[AttentionConfig, ...]:
    """Reads the attention of each layer.

    Args:
        hf_config: The result of `with_new_names`.
    """
    window = read_sliding_window(hf_config, default=None)
    is_sliding = [False] * num_layers
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    hf_config = _with_rope_parameters(hf_config, layer_types)
    full_rope, sliding_rope = parse_ropes_by_layer_type(
        without_rotary_factor(hf_config), max_positions, required_types=set(layer_types)
    )
    heads = read_head_fields(hf_config, default_num_kv_heads=8, default_head_dim=128)
    heads["scale"] = read_number(hf_config, "query_pre_attn_scalar", heads["head_dim"]) ** -0.5
    full, sliding = attention_of_ropes(
        hf_config, heads, full_rope=full_rope, sliding_rope=sliding_rope
    )
    layers = attention_by_type(
        hf_config,
        is_sliding,
        full=full,
        sliding=sliding,
        window=window,
        max_position_embeddings=max_positions,
    )
    nums_heads = _read_nums_heads(hf_config, layer_types)
    return tuple(
        dataclasses.replace(layer, num_q_heads=num_heads)
        for layer, num_heads in zip(layers, nums_heads, strict=True)
    )


def _with_rope_parameters(
    hf_config: Mapping[str, object], layer_types: Sequence[LayerType]
) -> dict[str, object]:
    """The config.json with `rope_parameters` for each type of layer, as transformers 5 has them.

    The hub has lists with a number for each layer, and `rope_scaling`, which is of full layers.
    """
    rest = {name: hf_config[name] for name in hf_config if name not in _ROPE_FIELDS_OF_HUB}
    if hf_config.get("rope_parameters"):
        return rest
    scaling = read_object(hf_config, "rope_scaling")
    by_type = {}
    for layer_type in dict.fromkeys(layer_types):
        fields = {
            "rope_theta": _of_type(hf_config, "rope_theta", layer_types, layer_type),
            "partial_rotary_factor": _of_type(
                hf_config, "partial_rotary_factors", layer_types, layer_type
            ),
        }
        fields["rope_theta"] = read_number(fields, "rope_theta", 10_000.0)
        by_type[layer_type] = fields | (scaling if layer_type == "full_attention" else {})
    return {**rest, "rope_parameters": by_type}


def _of_type(
    hf_config: Mapping[str, object],
    name: str,
    layer_types: Sequence[LayerType],
    layer_type: LayerType,
) -> object:
    """The value of all layers of a type, from a list with a value for each layer."""
    values = hf_config.get(name) or None
    if not isinstance(values, list):
        return values
    if len(values) != len(layer_types):
        raise bad_list(name, values, len(layer_types))
    own = [value for value, other in zip(values, layer_types, strict=True) if other == layer_type]
    if any(value != own[0] for value in own):
        raise UnsupportedModelError(
            f"config.json: {name} has {own!r} for the layers of type {layer_type}; paxkv supports "
            "one value for each type of layer."
        )
    return own[0]


def _read_nums_heads(
    hf_config: Mapping[str, object], layer_types: Sequence[LayerType]
) -> tuple[int, ...]:
    """The number of query heads of each layer.

    transformers 5 saves `per_layer_config` with the layers that differ from the others.
    """
    name = "num_attention_heads"
    common = read_count(hf_config, name)
    changes = read_layer_overrides(hf_config, len(layer_types), supported=[name])
    if changes is None:
        num_sliding = _read_num_sliding_heads(hf_config, common)
        by_type = {"full_attention": common, "sliding_attention": num_sliding}
        return tuple(by_type[layer_type] for layer_type in layer_types)
    return tuple(
        read_count(changes.get(layer_idx, {}), name, common)
        for layer_idx in range(len(layer_types))
    )


def _read_num_sliding_heads(hf_config: Mapping[str, object], common: int) -> int:
    name, on_hub = "num_sliding_attention_heads", "attention_other_setting"
    if hf_config.get(name) is not None or not hf_config.get(on_hub):
        return read_count(hf_config, name, common)
    setting = read_object(hf_config, on_hub)
    head_dim = read_count(hf_config, "head_dim", 128)
    supported = {
        "attention_type": "sliding_attention",
        "num_attention_groups": read_count(hf_config, "num_key_value_heads", 8),
        "head_dim": head_dim,
        "true_head_dim": head_dim,
    }
    refuse_other_values(setting, supported)
    return read_count(setting, "num_attention_heads", common)
