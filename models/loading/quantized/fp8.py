"""Weights of 8-bit floats with scales of blocks, rows or whole tensors: `quant_method` fp8.

DeepSeek, Qwen3, GLM, MiniMax and Mistral publish weights in this format. `weight_scale_inv` and
`weight_scale` are two names of the same factor.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.errors import ModelConfigError
from models.loading.quantized.float8_numbers import (
    num_blocks,
    scale_blocks,
    widen_float8,
    widen_scales,
)
from models.loading.quantized.packed_integers import ScaledIntegers
from models.loading.quantized.quantization_fields import (
    FIELD,
    SkippedModules,
    read_choice,
    read_names,
)
from models.loading.quantized.stored_parts import FLOATS, StoredParts

_SCALE_ENDINGS = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8:
    """Implements `WeightFormat`.

    Args:
        block_size: Rows and columns that share a scale. None: a scale of each row, or one of all.
    """

    block_size: tuple[int, int] | None
    skipped: SkippedModules
    endings: tuple[str, ...] = (*_SCALE_ENDINGS, "")
    number_endings: tuple[str, ...] = ("",)
    plain_ending: str = ""

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "Fp8":
        """Reads `quantization_config`.

        Raises:
            ModelConfigError: A field is of the wrong type.
            UnsupportedModelError: The numbers have another format.
        """
        read_choice(f"{FIELD}.fmt", fields.get("fmt") or "e4m3", ("e4m3", "float8_e4m3fn"))
        read_choice(f"{FIELD}.expert_dtype", fields.get("expert_dtype") or "fp8", ("fp8",))
        # MiniMax calls the list `ignored_layers`.
        skipped = read_names(fields, "modules_to_not_convert", "ignored_layers")
        name = "weight_block_size"
        has_blocks = fields.get(name) is not None
        return cls(
            block_size=read_block_size(fields[name], f"{FIELD}.{name}") if has_blocks else None,
            skipped=SkippedModules(skipped),
        )

    def skips(self, module: str) -> bool:
        """See `WeightFormat.skips`."""
        return module in self.skipped

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """See `WeightFormat.plain_shape`."""
        shape = parts.require("", ["F8_E4M3"], num_axes=(2, 3)).shape
        ending = next((e for e in _SCALE_ENDINGS if e in parts.tensors), _SCALE_ENDINGS[0])
        parts.require(ending, [*FLOATS, "F8_E8M0", "U8"])
        if self.block_size is not None:
            parts.check_shape(ending, num_blocks(shape, self.block_size))
        else:
            leading = shape[:-2]
            of_tensor = (leading, (*leading, 1), (*leading, 1, 1))
            parts.check_shape(ending, *of_tensor, (*shape[:-1], 1), shape[:-1])
        return shape

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """See `WeightFormat.read_integers`."""
        numbers, scales = arrays[""].view(np.uint8), _scales(arrays)
        if self.block_size is None:
            return ScaledIntegers(
                numbers=numbers, scales=_as_columns(scales, numbers), group_size=None, code="e4m3"
            )
        block_rows, group_size = self.block_size
        return ScaledIntegers(
            numbers=numbers,
            scales=scales,
            group_size=group_size,
            code="e4m3",
            block_rows=block_rows,
        )

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """See `WeightFormat.dequantize`."""
        weight = widen_float8(arrays[""])
        scales = _scales(arrays)
        if self.block_size is not None:
            scale_blocks(weight, scales, self.block_size)
        else:
            weight *= _as_columns(scales, weight)
        return weight.astype(dtype, copy=False)


def _scales(arrays: Mapping[str, np.ndarray]) -> np.ndarray:  # f32
    return widen_scales(next(arrays[e] for e in _SCALE_ENDINGS if e in arrays))


def _as_columns(scales: np.ndarray, weight: np.ndarray) -> np.ndarray:  # f32[..., out or 1, 1]
    leading = weight.shape[:-2]
    return scales.reshape(*leading, scales.size // math.prod(leading), 1)


def read_block_size(value: object, name: str) -> tuple[int, int]:
    """Reads the numbers of rows and columns of a block.

    Args:
        name: The full name of the field, for the message.

    Raises:
        ModelConfigError: The value is not a list of two positive integers.
    """
    sizes = value if isinstance(value, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ModelConfigError(
            f"config.json: {name} is {value!r:.80}; expected two positive integers. Use the "
            "config.json that was published with the weights."
        )
    return sizes[0], sizes[1]
