"""Which layers of a model attend to a sliding window, and how long it is, from its config.json."""

from collections.abc import Mapping
from typing import Literal, get_args

from models.config_fields import read_count, read_flag
from models.errors import ModelConfigError, UnsupportedModelError
from models.family_traits import FamilyTraits

LayerType = Literal["full_attention", "sliding_attention"]

# `max_window_layers` of Qwen2 and Qwen3 where it is left out.
_DEFAULT_MAX_WINDOW_LAYERS = 28


def read_sliding_window(hf_config: Mapping[str, object], traits: FamilyTraits) -> int | None:
    """The window as written; None where the model has none, or has it switched off."""
    if traits.window_rule == "never":
        return None
    if traits.window_rule == "flagged" and not read_flag(hf_config, "use_sliding_window"):
        return None
    # Null is no window; only a field left out is the default.
    if hf_config.get("sliding_window", traits.default_sliding_window) is None:
        return None
    return read_count(hf_config, "sliding_window", traits.default_sliding_window)


def read_layer_types(
    hf_config: Mapping[str, object],
    traits: FamilyTraits,
    *,
    num_layers: int,
    sliding_window: int | None,
) -> tuple[LayerType, ...]:
    """The type of each layer, in order.

    Args:
        sliding_window: From `read_sliding_window`.

    Raises:
        ModelConfigError: `layer_types` has the wrong length, or contradicts the window.
        UnsupportedModelError: `layer_types` names another kind of attention.
    """
    if traits.window_rule == "never":
        return ("full_attention",) * num_layers
    by_rule = _types_by_rule(hf_config, traits, num_layers, sliding_window)
    written = _read_written_types(hf_config, num_layers)
    if written is None:
        return by_rule
    if traits.window_rule == "every_layer" and written != by_rule:
        # transformers gives every layer the window all the same.
        raise UnsupportedModelError(
            f"config.json: layer_types={list(written)} differs from {by_rule[0]!r} for every "
            f"layer, which is what this architecture does with {sliding_window=}. "
            "Leave layer_types out."
        )
    if sliding_window is None and "sliding_attention" in written:
        raise ModelConfigError(
            "config.json: layer_types has sliding layers, and there is no window "
            f"(sliding_window={hf_config.get('sliding_window')}, "
            f"use_sliding_window={hf_config.get('use_sliding_window')}); wanted both or neither."
        )
    return written


def _types_by_rule(
    hf_config: Mapping[str, object],
    traits: FamilyTraits,
    num_layers: int,
    sliding_window: int | None,
) -> tuple[LayerType, ...]:
    if traits.window_rule == "pattern":
        # Pattern 3 -> sliding, sliding, full, sliding, sliding, full, ...
        pattern = traits.default_window_pattern
        if traits.has_window_pattern_field:
            pattern = read_count(hf_config, "sliding_window_pattern", pattern)
        is_sliding = [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)]
    elif sliding_window is None:
        is_sliding = [False] * num_layers
    elif traits.window_rule == "flagged":
        first_sliding = read_count(
            hf_config, "max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, minimum=0
        )
        is_sliding = [layer_idx >= first_sliding for layer_idx in range(num_layers)]
    else:
        is_sliding = [True] * num_layers
    return tuple("sliding_attention" if sliding else "full_attention" for sliding in is_sliding)


def _read_written_types(
    hf_config: Mapping[str, object], num_layers: int
) -> tuple[LayerType, ...] | None:
    written = hf_config.get("layer_types")
    if written is None:
        return None
    if not isinstance(written, list) or len(written) != num_layers:
        raise ModelConfigError(
            f"config.json: layer_types is {written!r}; wanted a list of {num_layers} names, one "
            "for each layer."
        )
    unknown = [name for name in written if name not in get_args(LayerType)]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer type {unknown[0]!r} is not supported; supported are "
            f"{', '.join(get_args(LayerType))}."
        )
    return tuple(written)
