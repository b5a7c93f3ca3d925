"""Quantizes one matrix in each format, with loops over groups instead of reshaped arrays."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.models.loading.quantized.stored import pack

# The columns of AutoAWQ's words.
AWQ_COLUMNS = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E2M1 = np.array([*E2M1, *(-number for number in E2M1)], np.float32)
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [24, 48]}
MXFP4 = {"quant_method": "mxfp4"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False}


def compressed(layout: str, **weights: object) -> dict[str, object]:
    """A `quantization_config` of compressed-tensors with one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


PACKED = compressed(
    "pack-quantized", num_bits=4, type="int", strategy="group", group_size=16, symmetric=False
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """One matrix.

    Attributes:
        parts: What follows the module's name -> tensor.
        weight: What the tensors stand for, f32[out, in].
    """

    parts: dict[str, np.ndarray]
    weight: np.ndarray


def with_groups(
    weight: np.ndarray, group_idx: np.ndarray, num_bits: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Integers [out, in], scales and zero points [out, num_groups], and the weights for them."""
    num_groups, limit = group_idx.max() + 1, 2**num_bits - 1
    numbers = np.zeros(weight.shape, np.int64)
    scales = np.zeros((len(weight), num_groups), np.float16)
    zeros = np.zeros((len(weight), num_groups), np.int64)
    exact = np.zeros(weight.shape, np.float32)
    for group in range(num_groups):
        columns = np.flatnonzero(group_idx == group)
        own = weight[:, columns]
        scale = ((own.max(1) - own.min(1)) / limit).astype(np.float16)
        zero = np.clip(np.rint(-own.min(1) / scale.astype(np.float32)), 1, limit).astype(np.int64)
        scales[:, group], zeros[:, group] = scale, zero
        for column in columns:
            number = np.rint(weight[:, column] / scale.astype(np.float32)) + zero
            numbers[:, column] = np.clip(number, 0, limit)
            exact[:, column] = (numbers[:, column] - zero) * scale.astype(np.float32)
    return numbers, scales, zeros, exact


def as_fp8(weight: np.ndarray) -> Quantized:
    rows, columns = FP8["weight_block_size"]
    num_blocks = (-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    scales = np.zeros(num_blocks, np.float32)
    numbers = np.zeros(weight.shape, ml_dtypes.float8_e4m3fn)
    exact = np.zeros(weight.shape, np.float32)
    for row, column in np.ndindex(num_blocks):
        block = slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns)
        scales[row, column] = np.abs(weight[block]).max() / 448
        numbers[block] = (weight[block] / scales[row, column]).astype(numbers.dtype)
        exact[block] = numbers[block].astype(np.float32) * scales[row, column]
    return Quantized(parts={"weight": numbers, "weight_scale_inv": scales}, weight=exact)


def as_mxfp4(weight: np.ndarray) -> Quantized:
    num_blocks = weight.shape[1] // 32
    blocks = np.zeros((len(weight), num_blocks, 16), np.uint8)
    scales = np.zeros((len(weight), num_blocks), np.uint8)
    exact = np.zeros(weight.shape, np.float32)
    for row, block in np.ndindex(scales.shape):
        own = weight[row, 32 * block : 32 * (block + 1)]
        exponent = int(np.ceil(np.log2(np.abs(own).max() / 6)))
        codes = np.abs(own[:, None] / 2.0**exponent - E2M1).argmin(1)
        scales[row, block] = 127 + exponent
        blocks[row, block] = codes[0::2] | codes[1::2] << 4
        exact[row, 32 * block : 32 * (block + 1)] = E2M1[codes] * 2.0**exponent
    return Quantized(parts={"weight_blocks": blocks, "weight_scales": scales}, weight=exact)


def as_awq(weight: np.ndarray) -> Quantized:
    neighbors = np.arange(weight.shape[1]) // AWQ["group_size"]
    numbers, scales, zeros, exact = with_groups(weight, neighbors, 4)
    order = [8 * word + c for word in range(len(weight) // 8) for c in AWQ_COLUMNS]
    parts = {
        "qweight": pack(numbers.T[:, order], 4),
        "qzeros": pack(zeros.T[:, order], 4),
        "scales": np.ascontiguousarray(scales.T),
    }
    return Quantized(parts=parts, weight=exact)


def as_gptq(weight: np.ndarray) -> Quantized:
    """With activation order: the inputs of a group are not neighbors."""
    group_idx = np.arange(weight.shape[1], dtype=np.int32) // GPTQ["group_size"]
    group_idx = np.random.RandomState(0).permutation(group_idx)
    numbers, scales, zeros, exact = with_groups(weight, group_idx, 4)
    parts = {
        "qweight": np.ascontiguousarray(pack(numbers, 4).T),
        "qzeros": pack(zeros.T - 1, 4),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": group_idx,
    }
    return Quantized(parts=parts, weight=exact)


def as_packed(weight: np.ndarray) -> Quantized:
    numbers, scales, zeros, exact = with_groups(weight, np.arange(weight.shape[1]) // 16, 4)
    parts = {
        "weight_packed": pack(numbers, 4),
        "weight_scale": scales,
        "weight_zero_point": np.ascontiguousarray(pack(zeros.T, 4).T),
        "weight_shape": np.array(weight.shape),
    }
    return Quantized(parts=parts, weight=exact)


# `quant_method` -> `quantization_config`, and what quantizes one matrix.
QUANTIZERS: dict[str, tuple[dict[str, object], Callable[[np.ndarray], Quantized]]] = {
    "fp8": (FP8, as_fp8),
    "mxfp4": (MXFP4, as_mxfp4),
    "awq": (AWQ, as_awq),
    "gptq": (GPTQ, as_gptq),
    "compressed-tensors": (PACKED, as_packed),
}
