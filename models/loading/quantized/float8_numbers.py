"""Widens 8-bit floats, and applies scales of blocks to them."""

import ml_dtypes
import numpy as np


def widen_float8(
    numbers: np.ndarray,  # an 8-bit float of `ml_dtypes`
) -> np.ndarray:  # f32, of the same shape
    """The same numbers. A table is three times as fast as `astype` (measured on one x86-64)."""
    table = np.arange(256, dtype=np.uint8).view(numbers.dtype).astype(np.float32)
    return table[numbers.view(np.uint8)]


def widen_scales(scales: np.ndarray) -> np.ndarray:  # f32, of the same shape
    """Scales as float32. Octets are E8M0: powers of two, of which 127 is 1."""
    if scales.dtype == np.uint8:
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    return scales.astype(np.float32)


def num_blocks(shape: tuple[int, ...], block_size: tuple[int, int]) -> tuple[int, ...]:
    """The shape of the scales of blocks. Blocks at the end of an axis may be smaller."""
    num_rows, num_columns = block_size
    return (*shape[:-2], -(-shape[-2] // num_rows), -(-shape[-1] // num_columns))


def scale_blocks(
    weight: np.ndarray,  # f32[..., out, in], is changed
    scales: np.ndarray,  # f32[..., out / rows, in / columns]
    block_size: tuple[int, int],
) -> None:
    """Multiplies each block of rows and columns by its scale."""
    num_rows, num_columns = block_size
    for row in range(scales.shape[-2]):
        of_columns = np.repeat(scales[..., row, :], num_columns, axis=-1)[..., : weight.shape[-1]]
        weight[..., row * num_rows : (row + 1) * num_rows, :] *= of_columns[..., None, :]
