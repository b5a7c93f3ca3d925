"""`CompressedScheme`: how one group of modules is stored by compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from models.config.fields import read_count, read_flag
from models.errors import UnsupportedModelError
from models.loading.quantized.fp8 import read_block_size
from models.loading.quantized.quantization_fields import as_object, read_choice, with_path

# The formats of groups -> the types that their numbers may have.
_TYPES = {
    "pack-quantized": ("int",),
    "int-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}
_NUM_BITS = {"int": (4, 8), "float": (8,)}
Strategy = Literal["tensor", "channel", "group", "block"]
_STRATEGIES = ("tensor", "channel", "group", "block")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedScheme:
    """The field `weights` of one of the `config_groups`.

    Args:
        is_packed: Words of 32 bits hold several integers. Otherwise every number has 8 bits.
        strategy: Which numbers of a weight share a scale: all, or all of an output, of a group of
            inputs of an output, or of a block of inputs and outputs.
        group_size: Inputs of a group, with the strategy "group".
        block_size: Outputs and inputs of a block, with the strategy "block".
        has_zeros: Zero points are stored.
    """

    is_packed: bool
    is_float: bool
    num_bits: int
    strategy: Strategy
    group_size: int | None
    block_size: tuple[int, int] | None
    has_zeros: bool


def read_scheme(
    group: Mapping[str, object], *, default_format: object, path: str
) -> CompressedScheme | None:
    """Reads one of the `config_groups`. None: it does not quantize weights.

    Args:
        default_format: Of groups without a format of their own.
        path: The full name of the group, for messages.

    Raises:
        ModelConfigError: A field is missing or of the wrong type.
        UnsupportedModelError: The numbers have another format.
    """
    if group.get("weights") is None:
        return None
    weights = as_object(group["weights"], f"{path}.weights")
    format_name = read_choice(f"{path}.format", group.get("format") or default_format, [*_TYPES])
    path = f"{path}.weights"
    fields = with_path(weights, path)
    kind = read_choice(f"{path}.type", weights.get("type") or "int", _TYPES[format_name])
    bits = weights.get("num_bits", 8)
    strategy = read_choice(f"{path}.strategy", _strategy(weights), _STRATEGIES)
    has_zeros = not read_flag(fields, f"{path}.symmetric", True)
    if has_zeros and (kind == "float" or strategy == "block"):
        raise UnsupportedModelError(
            f"config.json: {path}.symmetric is false with the type {kind!r} and the strategy "
            f"{strategy!r}; paxkv supports zero points of integers, and none of blocks. Use "
            "another release of this model."
        )
    block_size = None
    if strategy == "block":
        block_size = read_block_size(weights.get("block_structure"), f"{path}.block_structure")
    return CompressedScheme(
        is_packed=format_name == "pack-quantized",
        is_float=kind == "float",
        num_bits=read_choice(f"{path}.num_bits", bits, _NUM_BITS[kind]),
        strategy=strategy,
        group_size=read_count(fields, f"{path}.group_size") if strategy == "group" else None,
        block_size=block_size,
        has_zeros=has_zeros,
    )


def _strategy(weights: Mapping[str, object]) -> object:
    """The strategy, or the one that compressed-tensors infers from the size of groups."""
    if weights.get("strategy") is not None:
        return weights["strategy"]
    if weights.get("group_size") is None:
        return "tensor"
    return "channel" if weights["group_size"] == -1 else "group"
