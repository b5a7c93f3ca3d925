"""Weights that llm-compressor wrote: `quant_method` compressed-tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from models.loading.quantized.compressed_groups import (
    NamedModules,
    SchemeGroup,
    read_groups,
    scheme_of,
)
from models.loading.quantized.compressed_scheme import CompressedScheme
from models.loading.quantized.float8_numbers import num_blocks, scale_blocks, widen_float8
from models.loading.quantized.packed_integers import ScaledIntegers, num_groups, unpack_words
from models.loading.quantized.quantization_fields import (
    FIELD,
    as_object,
    read_choice,
    read_names,
)
from models.loading.quantized.stored_parts import FLOATS, StoredParts

_PACKED, _PLAIN = ".weight_packed", ".weight"
_SCALE, _ZERO, _GROUP_IDX = ".weight_scale", ".weight_zero_point", ".weight_g_idx"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressedTensors:
    """Implements `WeightFormat`.

    Packed integers are stored without a sign: 4 bits 0 to 15 are -8 to 7. So are packed zero
    points. They are packed along the outputs, and weights are packed along the inputs.
    """

    groups: tuple[SchemeGroup, ...]
    ignored: NamedModules
    # `.weight_shape` repeats what the shapes of the other tensors say.
    endings: tuple[str, ...] = (_PACKED, _SCALE, _ZERO, _GROUP_IDX, ".weight_shape", _PLAIN)
    number_endings: tuple[str, ...] = (_PACKED, _PLAIN)
    plain_ending: str = _PLAIN

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "CompressedTensors":
        """Reads `quantization_config`.

        Raises:
            ModelConfigError: A field is missing or of the wrong type.
            UnsupportedModelError: Weights have another format, are sparse, or are rotated.
        """
        sparsity = as_object(fields.get("sparsity_config") or {}, f"{FIELD}.sparsity_config")
        layout = sparsity.get("format") or "dense"
        read_choice(f"{FIELD}.sparsity_config.format", layout, ("dense",))
        transforms = as_object(fields.get("transform_config") or {}, f"{FIELD}.transform_config")
        rotations = transforms.get("config_groups") or {}
        read_choice(f"{FIELD}.transform_config.config_groups", rotations, ({},))
        ignored = NamedModules(read_names(fields, "ignore"), field=f"{FIELD}.ignore")
        return cls(groups=read_groups(fields), ignored=ignored)

    def skips(self, module: str) -> bool:
        """See `WeightFormat.skips`."""
        return self.ignored.has_name(module) or self.ignored.has_pattern(module)

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """See `WeightFormat.plain_shape`."""
        scheme = scheme_of(parts.module, self.groups)
        if scheme.is_packed:
            out_features, num_words = parts.require(_PACKED, ["I32"], num_axes=(2,)).shape
            shape = out_features, num_words * 32 // scheme.num_bits
        else:
            dtype = "F8_E4M3" if scheme.is_float else "I8"
            shape = parts.require(_PLAIN, [dtype], num_axes=(2,)).shape
        scale_shapes = _scale_shapes(scheme, shape)
        parts.require(_SCALE, FLOATS)
        parts.check_shape(_SCALE, *scale_shapes)
        if scheme.has_zeros:
            has_words = _has_packed_zeros(scheme)
            parts.require(_ZERO, ["I32" if has_words else "I8"])
            if has_words:
                num_words = -(-shape[0] * scheme.num_bits // 32)
                scale_shapes = ((num_words, scale_shapes[0][1]),)
            parts.check_shape(_ZERO, *scale_shapes)
        if _GROUP_IDX in parts.tensors:
            parts.require(_GROUP_IDX, ["I32", "I64"])
            parts.check_shape(_GROUP_IDX, shape[1:])
        return shape

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """See `WeightFormat.read_integers`."""
        scheme = scheme_of(module, self.groups)
        integers = _scaled_integers(arrays, scheme)
        if scheme.is_float:
            numbers = arrays[_PLAIN].view(np.uint8)
            integers = replace(integers, numbers=numbers, zeros=0, code="e4m3")
        if scheme.block_size is not None:
            block_rows, group_size = scheme.block_size
            integers = replace(integers, block_rows=block_rows, group_size=group_size)
        return integers

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """See `WeightFormat.dequantize`."""
        scheme = scheme_of(module, self.groups)
        if scheme.block_size is None:
            return _scaled_integers(arrays, scheme).dequantize().astype(dtype, copy=False)
        numbers, scales = _numbers(arrays, scheme), arrays[_SCALE].astype(np.float32)
        weight = numbers.astype(np.float32) - _zeros(arrays, scheme, num_rows=len(numbers))
        scale_blocks(weight, scales, scheme.block_size)
        return weight.astype(dtype, copy=False)


def _scaled_integers(arrays: Mapping[str, np.ndarray], scheme: CompressedScheme) -> ScaledIntegers:
    """The weight without its blocks; the numbers may be floats."""
    numbers, group_idx = _numbers(arrays, scheme), arrays.get(_GROUP_IDX)
    if group_idx is not None and -1 in group_idx:  # never set
        group_idx = None
    return ScaledIntegers(
        numbers=numbers,
        scales=_as_columns(arrays[_SCALE].astype(np.float32), scheme),
        zeros=_zeros(arrays, scheme, num_rows=len(numbers)),
        group_size=scheme.group_size,
        group_idx=group_idx,
    )


def _scale_shapes(scheme: CompressedScheme, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes that the scales of a weight of this shape may have."""
    out_features, in_features = shape
    match scheme.strategy:
        case "tensor":
            return (1,), (), (1, 1)
        case "channel":
            return (out_features, 1), (out_features,)
        case "group":
            return ((out_features, num_groups(in_features, scheme.group_size)),)
        case "block":
            return (num_blocks(shape, scheme.block_size),)


def _has_packed_zeros(scheme: CompressedScheme) -> bool:
    return scheme.is_packed and scheme.strategy != "tensor"


def _numbers(
    arrays: Mapping[str, np.ndarray], scheme: CompressedScheme
) -> np.ndarray:  # u8, i8 or f32, [out, in]
    if scheme.is_packed:
        return unpack_words(arrays[_PACKED], scheme.num_bits)
    return widen_float8(arrays[_PLAIN]) if scheme.is_float else arrays[_PLAIN]


def _zeros(
    arrays: Mapping[str, np.ndarray], scheme: CompressedScheme, *, num_rows: int
) -> np.ndarray | int:
    """The zero points of the numbers as `_numbers` returns them."""
    offset = 2 ** (scheme.num_bits - 1) if scheme.is_packed else 0
    if not scheme.has_zeros:
        return offset
    if _has_packed_zeros(scheme):
        return unpack_words(arrays[_ZERO].T, scheme.num_bits).T[:num_rows]
    return _as_columns(arrays[_ZERO].astype(np.int32) + offset, scheme)


def _as_columns(numbers: np.ndarray, scheme: CompressedScheme) -> np.ndarray:
    """Scales or zero points as [out or 1, num_groups], or of blocks as they are."""
    return numbers if scheme.strategy in ("group", "block") else numbers.reshape(-1, 1)
