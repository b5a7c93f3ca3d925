"""Weights of 4-bit floats in blocks of 32 that share a power of two: `quant_method` mxfp4.

gpt-oss publishes its experts in this format. `..._blocks` has two numbers in an octet, the first in
the low bits. A number is E2M1, and a scale is E8M0.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.loading.quantized.float8_numbers import widen_scales
from models.loading.quantized.packed_integers import ScaledIntegers
from models.loading.quantized.quantization_fields import SkippedModules, read_names
from models.loading.quantized.stored_parts import StoredParts

_OCTETS_PER_BLOCK = 16
# The number of each code: a sign, two bits of exponent and one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)
# The two numbers of each octet.
_PAIRS = np.stack([np.tile(_NUMBERS, 16), np.repeat(_NUMBERS, 16)], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mxfp4:
    """Implements `WeightFormat`."""

    skipped: SkippedModules
    endings: tuple[str, ...] = ("_blocks", "_scales")
    number_endings: tuple[str, ...] = ("_blocks",)
    plain_ending: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "Mxfp4":
        """Reads `quantization_config`.

        Raises:
            ModelConfigError: A field is of the wrong type.
        """
        return cls(skipped=SkippedModules(read_names(fields, "modules_to_not_convert")))

    def skips(self, module: str) -> bool:
        """See `WeightFormat.skips`."""
        return module in self.skipped

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """See `WeightFormat.plain_shape`."""
        # [out, in / 32, 16], or [num_experts, out, in / 32, 16]
        shape = parts.require("_blocks", ["U8"], num_axes=(3, 4)).shape
        parts.check_shape("_blocks", (*shape[:-1], _OCTETS_PER_BLOCK))
        parts.require("_scales", ["U8"])
        parts.check_shape("_scales", shape[:-1])
        *leading, out_features, num_blocks, _ = shape
        in_features = 2 * _OCTETS_PER_BLOCK * num_blocks
        if leading:
            return (*leading, in_features, out_features)
        return out_features, in_features

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """See `WeightFormat.read_integers`."""
        blocks = arrays["_blocks"]
        numbers = np.stack([blocks & 15, blocks >> 4], axis=-1)
        return ScaledIntegers(
            numbers=numbers.reshape(*blocks.shape[:-2], -1),
            scales=widen_scales(arrays["_scales"]),
            group_size=2 * _OCTETS_PER_BLOCK,
            code="e2m1",
            is_turned=blocks.ndim == 4,
        )

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """See `WeightFormat.dequantize`."""
        blocks, scales = arrays["_blocks"], widen_scales(arrays["_scales"])
        if blocks.ndim == 3:
            return _widen(blocks, scales).astype(dtype, copy=False)
        weight = np.empty((*blocks.shape[:2], 32 * blocks.shape[2]), dtype)
        # One expert at a time, so that all of them are never in memory in float32.
        for expert, (expert_blocks, expert_scales) in enumerate(zip(blocks, scales, strict=True)):
            weight[expert] = _widen(expert_blocks, expert_scales)
        # Stacks that are not quantized have [num_experts, in, out].
        return weight.swapaxes(1, 2)


def _widen(
    blocks: np.ndarray,  # u8[out, num_blocks, 16]
    scales: np.ndarray,  # f32[out, num_blocks]
) -> np.ndarray:  # f32[out, num_blocks * 32]
    numbers = _PAIRS[blocks].reshape(*scales.shape, 2 * _OCTETS_PER_BLOCK)
    numbers *= scales[..., None]
    return numbers.reshape(len(blocks), -1)
