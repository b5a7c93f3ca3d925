"""Which layers of a model have a sliding window or no positions, from its config.json."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal, get_args

from models.config.attention_config import AttentionConfig
from models.config.fields import read_count
from models.config.rope_config import RopeConfig, max_scaled_positions
from models.errors import ModelConfigError, UnsupportedModelError

LayerType = Literal["full_attention", "sliding_attention"]


def read_sliding_window(hf_config: Mapping[str, object], default: int | None) -> int | None:
    """The window as written. Null is no window; only a field left out is the default."""
    if hf_config.get("sliding_window", default) is None:
        return None
    return read_count(hf_config, "sliding_window", default)


def read_layer_types(
    hf_config: Mapping[str, object], is_sliding: Iterable[bool], *, sliding_window: int | None
) -> tuple[LayerType, ...]:
    """The type of each layer, in order: from `layer_types`, if config.json has it.

    Args:
        is_sliding: For each layer, by the family's own rule.
        sliding_window: None if the model has no window, or has it switched off.

    Raises:
        ModelConfigError: `layer_types` has the wrong length, or contradicts the window.
        UnsupportedModelError: `layer_types` names another kind of attention.
    """
    by_rule = tuple("sliding_attention" if slides else "full_attention" for slides in is_sliding)
    written = hf_config.get("layer_types")
    if written is None:
        return by_rule
    if not isinstance(written, list) or len(written) != len(by_rule):
        raise ModelConfigError(
            f"config.json: layer_types is {written!r}; expected a list of {len(by_rule)} names, "
            "one for each layer."
        )
    unknown = [name for name in written if name not in get_args(LayerType)]
    if unknown:
        raise UnsupportedModelError(
            f"config.json: layer type {unknown[0]!r} is not supported; paxkv supports "
            f"{', '.join(get_args(LayerType))}."
        )
    if sliding_window is None and "sliding_attention" in written:
        raise ModelConfigError(
            "config.json: layer_types has sliding layers, but no window is set "
            f"(sliding_window={hf_config.get('sliding_window')}, "
            f"use_sliding_window={hf_config.get('use_sliding_window')}); set both or neither."
        )
    return tuple(written)


def with_window(
    attention: AttentionConfig, window: int | None, max_position_embeddings: int
) -> AttentionConfig:
    """The attention with that window, or unchanged if it holds all positions of the model."""
    rope: RopeConfig = attention.rope
    if window is None or window >= max_scaled_positions(rope, max_position_embeddings):
        return attention
    return replace(attention, sliding_window=window)


def attention_by_type(
    hf_config: Mapping[str, object],
    is_sliding: Iterable[bool],
    *,
    full: AttentionConfig,
    sliding: AttentionConfig,
    window: int | None,
    max_position_embeddings: int,
) -> tuple[AttentionConfig, ...]:
    """The attention of each layer, by its type (`read_layer_types`).

    Args:
        is_sliding: For each layer, by the family's own rule.
        full: The attention of full layers.
        sliding: The attention of sliding layers, without the window.
        window: None if the model has no window, or has it switched off.

    Raises: As `read_layer_types`.
    """
    by_type = {
        "full_attention": full,
        "sliding_attention": with_window(sliding, window, max_position_embeddings),
    }
    layer_types = read_layer_types(hf_config, is_sliding, sliding_window=window)
    return tuple(by_type[layer_type] for layer_type in layer_types)


def read_has_positions(hf_config: Mapping[str, object], num_layers: int) -> list[bool]:
    """For each layer, whether it rotates queries and keys: by default all but every fourth.

    Raises:
        ModelConfigError: `no_rope_layers` is no list of zeros and ones, or is too short.
    """
    written = hf_config.get("no_rope_layers")
    if not written:
        interval = read_count(hf_config, "no_rope_layer_interval", 4)
        return [(layer_idx + 1) % interval != 0 for layer_idx in range(num_layers)]
    if (
        not isinstance(written, list)
        or len(written) < num_layers
        or any(value not in (0, 1) for value in written)
    ):
        raise ModelConfigError(
            f"config.json: no_rope_layers is {written!r}; expected a list of {num_layers} numbers, "
            "0 for each layer without positions and 1 for each other layer."
        )
    return [value == 1 for value in written[:num_layers]]
