"""Writes quantized checkpoints from arrays, and packs integers one at a time."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from models.loading.quantized.dequantized_checkpoint import DequantizedCheckpoint
from models.loading.quantized.find_format import find_weight_format
from models.loading.safetensors_reader import SafetensorsCheckpoint

MODULE = "model.layers.0.mlp.up_proj"
_DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
}


def save_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Writes a safetensors file, also of dtypes that `safetensors.numpy` cannot write."""
    header, end = {}, 0
    for name, array in tensors.items():
        start, end = end, end + array.nbytes
        header[name] = {
            "dtype": _DTYPES[array.dtype.name],
            "shape": list(array.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header).encode()
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in tensors.values())
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def open_tensors(
    folder: Path,
    tensors: Mapping[str, np.ndarray],
    quantization: Mapping[str, object],
    *,
    dtype: str = "float32",
) -> DequantizedCheckpoint:
    """The checkpoint of these tensors and this `quantization_config`."""
    save_tensors(folder / "model.safetensors", tensors)
    weight_format = find_weight_format({"quantization_config": quantization})
    return DequantizedCheckpoint(SafetensorsCheckpoint(folder), weight_format, dtype=dtype)


def of_module(parts: Mapping[str, np.ndarray], module: str = MODULE) -> dict[str, np.ndarray]:
    """The tensors of one module: "qweight" becomes "model.layers.0.mlp.up_proj.qweight"."""
    return {f"{module}.{part}": array for part, array in parts.items()}


def pack(
    numbers: np.ndarray,  # of the last axis, in [0, 2**num_bits)
    num_bits: int,
) -> np.ndarray:  # i32[..., size * num_bits / 32, rounded up]
    """Packs numbers into words along the last axis, the first number in the lowest bits."""
    per_word = 32 // num_bits
    words = np.zeros((*numbers.shape[:-1], -(-numbers.shape[-1] // per_word)), np.int64)
    for column in range(numbers.shape[-1]):
        word, place = divmod(column, per_word)
        words[..., word] |= numbers[..., column].astype(np.int64) << (num_bits * place)
    return words.astype(np.uint32).view(np.int32)
