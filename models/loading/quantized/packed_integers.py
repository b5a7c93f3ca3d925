"""Unpacks numbers of few bits, and applies scales of groups to them."""

from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

# Integers, or the bits of small floats: `ml_dtypes.float8_e4m3fn` and `ml_dtypes.float4_e2m1fn`.
Code = Literal["integer", "e4m3", "e2m1"]
_TABLES = {
    "e4m3": np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32),
    "e2m1": np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledIntegers:
    """A weight `(number - zero) * scale`, or a stack of weights. Most arguments are those of
    `scale_groups`.

    Args:
        code: What numbers stand for. Floats have no zero points.
        block_rows: Rows that share their scales.
        is_turned: Whether the weight is the transpose, [..., in, out].
    """

    numbers: np.ndarray  # [..., out, in]
    scales: np.ndarray
    zeros: np.ndarray | int = 0
    group_size: int | None
    group_idx: np.ndarray | None = None
    code: Code = "integer"
    block_rows: int = 1
    is_turned: bool = False

    def dequantize(self) -> np.ndarray:  # f32[out, in]
        """See `scale_groups`. For integers without blocks of rows."""
        return scale_groups(
            *(self.numbers, self.scales, self.zeros),
            group_size=self.group_size,
            group_idx=self.group_idx,
        )

    def expand(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The number, the scale (f32) and the zero point of each weight, in the weight's shape."""
        shape = self.numbers.shape
        size = shape[-1] if self.group_size is None else self.group_size
        group_idx = np.arange(shape[-1]) // size if self.group_idx is None else self.group_idx
        # Zero points may be 256, and differences negative.
        zeros = np.asarray(self.zeros, np.int16)
        zeros = np.take(zeros, group_idx, axis=-1) if zeros.ndim else zeros
        scales = self.scales.astype(np.float32)
        if self.block_rows > 1:
            scales = np.repeat(scales, self.block_rows, axis=-2)[..., : shape[-2], :]
        scales = np.take(scales, group_idx, axis=-1)
        numbers = self.numbers.astype(np.int16) if self.code == "integer" else self.numbers
        parts = numbers, np.broadcast_to(scales, shape), np.broadcast_to(zeros, shape)
        return tuple(part.swapaxes(-1, -2) for part in parts) if self.is_turned else parts


def widen_numbers(
    numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray, code: Code
) -> np.ndarray:  # f32
    """The weights of numbers that `ScaledIntegers.expand` returned."""
    if code == "integer":
        return (numbers - zeros).astype(np.float32) * scales
    return _TABLES[code][numbers] * scales


def unpack_words(
    words: np.ndarray,  # i32[..., num_words]
    num_bits: int,
) -> np.ndarray:  # u8[..., num_words * 32 / num_bits]
    """Splits words into unsigned integers of 2, 4 or 8 bits, those in the lowest bits first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    num_per_octet = 8 // num_bits
    unpacked = np.empty((*octets.shape[:-1], octets.shape[-1] * num_per_octet), np.uint8)
    for place in range(num_per_octet):
        unpacked[..., place::num_per_octet] = (octets >> (place * num_bits)) & (2**num_bits - 1)
    return unpacked


def num_groups(num_columns: int, group_size: int | None) -> int:
    """How many groups of neighboring columns a matrix has. None: all columns are one group."""
    return 1 if group_size is None else -(-num_columns // group_size)


def scale_groups(
    numbers: np.ndarray,  # [out, in], integers, or f32, which is changed
    scales: np.ndarray,  # f[out or 1, num_groups]
    zeros: np.ndarray | int,  # i[out or 1, num_groups], or one zero point for all numbers
    *,
    group_size: int | None,
    group_idx: np.ndarray | None = None,  # i[in]
) -> np.ndarray:  # f32[out, in]
    """Computes `(number - zero) * scale` with the scale and zero point of each number's group.

    Args:
        group_size: Columns of a group. None: all columns are one group.
        group_idx: The group of each column, if groups are not of neighboring columns.

    Raises:
        ValueError: `group_idx` names a group that does not exist.
    """
    num_columns = numbers.shape[1]
    weight = numbers.astype(np.float32, copy=False)
    scales = scales.astype(np.float32)
    zeros = np.asarray(zeros, np.float32)
    size = num_columns if group_size is None else group_size
    neighbors = np.arange(num_columns) // size
    if group_idx is None:
        group_idx = neighbors
    elif group_idx.min() < 0 or group_idx.max() >= scales.shape[1]:
        raise ValueError(
            f"groups {group_idx.min()} to {group_idx.max()} of columns; expected 0 to "
            f"{scales.shape[1] - 1}"
        )
    if np.array_equal(group_idx, neighbors) and num_columns % size == 0:
        groups = weight.reshape(len(weight), -1, size)
        groups -= zeros[..., None]
        groups *= scales[..., None]
    else:
        # `zeros[:, group_idx]` would lie column by column, and be five times as slow to subtract.
        weight -= np.take(zeros, group_idx, axis=1) if zeros.ndim else zeros
        weight *= np.take(scales, group_idx, axis=1)
    return weight
