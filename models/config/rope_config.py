"""`RopeConfig`: which rotary embedding a model uses, from both generations of config.json."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from models.config.fields import (
    read_count,
    read_flag,
    read_number,
    read_object,
    read_optional_number,
)
from models.errors import ModelConfigError, UnsupportedModelError

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

# Names of kinds in older configs. "mrope" has positions of images too; for text alone it is the
# plain embedding.
_OLDER_KINDS = {"su": "longrope", "mrope": "default"}

DEFAULT_ROPE_THETA = 10_000.0
# The default theta of full layers, if sliding layers have an embedding of their own.
DEFAULT_GLOBAL_ROPE_THETA = 1_000_000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Parameters of a rotary embedding. Parameters that its kind does not use keep their defaults.

    `models/layers/rotary.py` says what each kind computes.
    """

    kind: RopeKind = "default"
    theta: float = DEFAULT_ROPE_THETA
    factor: float = 1.0  # all kinds except default and longrope
    # Length the model was trained at before scaling: dynamic, llama3, yarn, longrope.
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the range of blended dimensions outwards
    # yarn and longrope: scales cos and sin. None, for yarn: derived from factor.
    attention_factor: float | None = None
    mscale: float | None = None  # yarn: with mscale_all_dim, changes the derived attention_factor
    mscale_all_dim: float | None = None  # yarn
    # longrope: divisors of the frequencies of all dimension pairs, for short and long requests
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    # longrope: whether `long_factors` apply, to all requests alike (`rope_for_length`).
    is_long: bool = True
    turned_share: float = 1.0  # proportional: of the head's dimension pairs, in (0, 1]


def parse_rope_config(hf_config: Mapping[str, object], max_position_embeddings: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before).

    The length before scaling is found as transformers does: for "dynamic" it is always
    `max_position_embeddings`; for "llama3", "yarn" and "longrope" a top-level
    `original_max_position_embeddings` wins, then the one next to the factor, then
    `max_position_embeddings`.

    Raises:
        UnsupportedModelError: An unknown kind, one embedding per layer type, or a partial rotation.
        ModelConfigError: A field that the kind needs is missing or malformed.
    """
    # Where both spellings are present the older wins, as in transformers.
    name = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    fields = read_object(hf_config, name)
    _refuse_nested(fields)
    default_theta = read_number(hf_config, "rope_theta", DEFAULT_ROPE_THETA)
    return _parse_fields(hf_config, fields, default_theta, max_position_embeddings)


def parse_ropes_by_layer_type(
    hf_config: Mapping[str, object],
    max_position_embeddings: int,
    *,
    required_types: Collection[str] = (),
) -> tuple[RopeConfig, RopeConfig]:
    """Reads the embeddings of a model's full-attention and sliding layers, as Gemma 3 has them.

    transformers 5 writes `rope_parameters` with one object for each layer type. Before,
    `rope_theta` and `rope_scaling` are of the full layers and `rope_local_base_freq` of the others.

    Args:
        required_types: Layer types whose `rope_theta` must be in `rope_parameters`.

    Raises: As `parse_rope_config`.
    """
    by_type = read_object(hf_config, "rope_parameters")
    flat = [name for name, value in by_type.items() if not isinstance(value, Mapping | None)]
    if flat:
        raise ModelConfigError(
            f"config.json: rope_parameters has {', '.join(flat)} for all layers; expected an "
            "object for full_attention and one for sliding_attention."
        )
    for layer_type in sorted(required_types):
        if read_object(by_type, layer_type).get("rope_theta") is None:
            raise ModelConfigError(
                f"config.json: rope_parameters has no rope_theta for {layer_type}; expected one "
                "for each type of layer in the model. Use the config.json that was published with "
                "the weights."
            )
    scaling = read_object(hf_config, "rope_scaling")
    _refuse_nested(scaling)
    full_fields = {**read_object(by_type, "full_attention"), **scaling}
    full_theta = read_number(hf_config, "rope_theta", DEFAULT_GLOBAL_ROPE_THETA)
    sliding_fields = read_object(by_type, "sliding_attention")
    sliding_theta = read_number(hf_config, "rope_local_base_freq", DEFAULT_ROPE_THETA)
    return (
        _parse_fields(hf_config, full_fields, full_theta, max_position_embeddings),
        _parse_fields(hf_config, sliding_fields, sliding_theta, max_position_embeddings),
    )


def with_default_rope(
    hf_config: Mapping[str, object], rope_parameters: Mapping[str, object]
) -> dict[str, object]:
    """The config.json with these rope parameters, if it has none under either name."""
    if hf_config.get("rope_scaling") or hf_config.get("rope_parameters") is not None:
        return dict(hf_config)
    return {**hf_config, "rope_parameters": rope_parameters}


def rope_for_length(rope: RopeConfig, max_model_len: int) -> RopeConfig:
    """The embedding of an engine whose requests have at most `max_model_len` tokens.

    For "longrope", the long factors apply if requests may be longer than the original length. They
    then apply to short requests too, since requests share cached keys.

    Source: vllm/model_executor/layers/rotary_embedding/phi3_long_rope_scaled_rope.py.
    """
    if rope.kind != "longrope":
        return rope
    return replace(rope, is_long=max_model_len > rope.original_max_position_embeddings)


def max_scaled_positions(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The number of positions for which a scaled embedding is made.

    For "yarn", it is the factor times the length before scaling. `max_position_embeddings` may be
    the length before scaling (Qwen2.5: 32,768 and a factor of 4 are 131,072) or after (DeepSeek).
    For the other kinds with a factor, it is the factor times `max_position_embeddings`. For
    "llama3", config.json states it already.

    Source: vllm/config/model.py, `_get_and_verify_max_len`.
    """
    if rope.kind == "yarn":
        scaled = rope.original_max_position_embeddings * rope.factor
    elif rope.kind in ("linear", "dynamic", "proportional"):
        scaled = max_position_embeddings * rope.factor
    else:
        return max_position_embeddings
    # If the factor is the ratio of two lengths, `scaled` is the longer one, or slightly less.
    return int(math.nextafter(scaled, math.inf))


def _parse_fields(
    hf_config: Mapping[str, object],
    fields: Mapping[str, object],
    default_theta: float,
    max_position_embeddings: int,
) -> RopeConfig:
    """Reads one embedding from the object that describes it."""
    name = fields.get("rope_type") or fields.get("type") or "default"
    kind = _OLDER_KINDS.get(name, name) if isinstance(name, str) else name
    if kind not in get_args(RopeKind):
        raise UnsupportedModelError(
            f"config.json: rope type {name!r} is not supported; paxkv supports "
            f"{', '.join(get_args(RopeKind))}."
        )
    theta = read_number(fields, "rope_theta", default_theta)
    if kind == "proportional":
        default_share = read_number(hf_config, "partial_rotary_factor", 1.0)
        return _parse_proportional(fields, theta, default_share)
    _refuse_partial_rotation(hf_config, fields)
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind="linear", theta=theta, factor=read_number(fields, "factor"))
    if kind == "dynamic":
        return RopeConfig(
            kind="dynamic",
            theta=theta,
            factor=read_number(fields, "factor"),
            original_max_position_embeddings=max_position_embeddings,
        )
    own_length = read_count(fields, "original_max_position_embeddings", max_position_embeddings)
    original_length = read_count(hf_config, "original_max_position_embeddings", own_length)
    if kind == "llama3":
        return _parse_llama3(fields, theta, original_length)
    if kind == "longrope":
        return _parse_longrope(fields, theta, original_length, max_position_embeddings)
    return _parse_yarn(fields, theta, original_length, max_position_embeddings)


def _parse_llama3(fields: Mapping[str, object], theta: float, original_length: int) -> RopeConfig:
    low, high = read_number(fields, "low_freq_factor"), read_number(fields, "high_freq_factor")
    if low > high:
        raise ModelConfigError(
            f"config.json: rope type 'llama3' has low_freq_factor={low} and "
            f"high_freq_factor={high}; the first must be at most the second."
        )
    return RopeConfig(
        kind="llama3",
        theta=theta,
        factor=read_number(fields, "factor"),
        original_max_position_embeddings=original_length,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _parse_yarn(
    fields: Mapping[str, object], theta: float, original_length: int, max_length: int
) -> RopeConfig:
    return RopeConfig(
        kind="yarn",
        theta=theta,
        # A null factor means the ratio of the two lengths, as in DeepSeek's configs.
        factor=read_number(fields, "factor", max_length / original_length),
        original_max_position_embeddings=original_length,
        beta_fast=read_optional_number(fields, "beta_fast") or 32.0,
        beta_slow=read_optional_number(fields, "beta_slow") or 1.0,
        truncate=read_flag(fields, "truncate", True),
        attention_factor=read_optional_number(fields, "attention_factor"),
        mscale=read_optional_number(fields, "mscale"),
        mscale_all_dim=read_optional_number(fields, "mscale_all_dim"),
    )


def _parse_longrope(
    fields: Mapping[str, object], theta: float, original_length: int, max_length: int
) -> RopeConfig:
    """Source: arXiv:2402.13753."""
    factor = read_number(fields, "factor", max_length / original_length)
    derived = 1.0
    if factor > 1:
        derived = math.sqrt(1 + math.log(factor) / math.log(original_length))
    return RopeConfig(
        kind="longrope",
        theta=theta,
        original_max_position_embeddings=original_length,
        attention_factor=read_number(fields, "attention_factor", derived),
        short_factors=_read_factors(fields, "short_factor"),
        long_factors=_read_factors(fields, "long_factor"),
    )


def _read_factors(fields: Mapping[str, object], name: str) -> tuple[float, ...]:
    written = fields.get(name)
    if not isinstance(written, list) or any(
        isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0
        for factor in written
    ):
        raise ModelConfigError(
            f"config.json: {name} is {written!r}; expected a list of positive numbers, one "
            "for each pair of rotated dimensions."
        )
    return tuple(map(float, written))


def _parse_proportional(
    fields: Mapping[str, object], theta: float, default_share: float
) -> RopeConfig:
    share = read_number(fields, "partial_rotary_factor", default_share)
    if share > 1:
        raise ModelConfigError(
            f"config.json: rope type 'proportional' has partial_rotary_factor={share}; expected at "
            "most 1."
        )
    return RopeConfig(
        kind="proportional",
        theta=theta,
        factor=read_number(fields, "factor", 1.0),
        turned_share=share,
    )


def _refuse_nested(fields: Mapping[str, object]) -> None:
    nested = [name for name, value in fields.items() if isinstance(value, Mapping)]
    if nested:
        raise UnsupportedModelError(
            f"config.json: rope parameters per layer type ({', '.join(nested)}) are not supported "
            "for this architecture; paxkv supports one rotary embedding for all layers."
        )


def _refuse_partial_rotation(hf_config: Mapping[str, object], fields: Mapping[str, object]) -> None:
    for holder in (hf_config, fields):
        if holder.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise UnsupportedModelError(
                f"config.json: partial_rotary_factor={holder['partial_rotary_factor']} is not "
                "supported for this architecture; paxkv supports 1.0, which rotates the whole head."
            )
