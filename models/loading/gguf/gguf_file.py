"""Reads the header of a GGUF file: its metadata, and where its tensors are.

The package `gguf` has a reader too. It takes about ten seconds for a vocabulary of 150,000 tokens.

Source: the GGUF specification, docs/gguf.md of ggml, versions 2 and 3.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from models.errors import CheckpointError, CheckpointNotFoundError, UnsupportedModelError

GGUF_SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
# Number of a type of metadata -> its code in `struct`.
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
_STRING, _ARRAY = 8, 9
# Number of a type of tensors -> its name, numbers in a block, and bytes of a block.
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFTensor:
    """Where a tensor is in the file."""

    name: str  # in the file: "blk.0.attn_q.weight"
    type_name: str  # of `TENSOR_TYPES`
    shape: tuple[int, ...]  # as a checkpoint in Hugging Face layout has it: [out, in]
    start: int  # in the file
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFile:
    """The header of a file, and the file as mapped memory."""

    path: Path
    metadata: dict[str, object]  # arrays of numbers are NumPy arrays, arrays of strings are lists
    tensors: dict[str, GGUFTensor]
    data: mmap.mmap

    def read_bytes(self, name: str) -> np.ndarray:  # u8[num_bytes]
        """Returns the bytes of a tensor, a view of the file."""
        tensor = self.tensors[name]
        return np.frombuffer(self.data, np.uint8, tensor.num_bytes, tensor.start)


def find_gguf_file(folder: Path) -> Path | None:
    """The only GGUF file of a folder without other weights; None if there is none.

    Raises:
        CheckpointNotFoundError: There are several.
    """
    found = sorted(folder.glob(f"*{GGUF_SUFFIX}"))
    if not found or (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found[:10])
        raise CheckpointNotFoundError(
            f"{folder} has {len(found)} GGUF files: {names}. Name one of them as the model, such "
            f"as {found[0]}."
        )
    return found[0]


def read_gguf(path: Path) -> GGUFFile:
    """Reads metadata and tensor descriptions. The data of tensors is mapped, not read.

    Raises:
        CheckpointError: The file is truncated, malformed, or not GGUF.
        UnsupportedModelError: The file is big-endian, a part of a split file, or of an unknown
            version, or a tensor has a type that paxkv does not read.
    """
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: the file is empty
        raise CheckpointError(f"{path} cannot be read: {error}. Download it again.") from error
    if data[:4] != _MAGIC:
        raise CheckpointError(
            f"{path} is not a GGUF file: it begins with {data[:4]!r}, not {_MAGIC!r}. Download it "
            "again."
        )
    try:
        metadata, tensors = _read_header(path, data)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise _bad_file(path, f"its header ends early or is malformed ({error})") from error
    return GGUFFile(path=path, metadata=metadata, tensors=tensors, data=data)


def _read_header(path: Path, data: mmap.mmap) -> tuple[dict[str, object], dict[str, GGUFTensor]]:
    cursor = _Cursor(data, position=len(_MAGIC))
    version = cursor.take("I")
    if version not in _VERSIONS:
        is_big_endian = version & 0xFFFF == 0
        raise UnsupportedModelError(
            f"{path} is a {'big-endian ' if is_big_endian else ''}GGUF file of version "
            f"{version >> 24 if is_big_endian else version}; paxkv reads little-endian files of "
            "versions 2 and 3. Convert the model again with a current llama.cpp."
        )
    num_tensors, num_fields = cursor.take("Q"), cursor.take("Q")
    metadata: dict[str, object] = {}
    for _ in range(num_fields):
        name = cursor.take_string()
        metadata[name] = cursor.take_value(cursor.take("I"))
    if (num_files := metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModelError(
            f"{path} is one of {num_files} parts of a model; paxkv reads GGUF files that are not "
            "split. Merge the parts: `llama-gguf-split --merge`."
        )
    descriptions = []
    for _ in range(num_tensors):
        name = cursor.take_string()
        dims = [cursor.take("Q") for _ in range(cursor.take("I"))]
        descriptions.append((name, tuple(reversed(dims)), cursor.take("I"), cursor.take("Q")))
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise _bad_file(path, f"general.alignment is {alignment!r}")
    start = -(-cursor.position // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_number, offset in descriptions:
        if name in tensors:
            raise _bad_file(path, f"it has two tensors {name}")
        tensors[name] = _describe_tensor(path, name, shape, type_number, start + offset)
    end = max((tensor.start + tensor.num_bytes for tensor in tensors.values()), default=0)
    if end > len(data):
        raise _bad_file(path, f"its tensors end at byte {end:,}")
    return metadata, tensors


def _describe_tensor(
    path: Path, name: str, shape: tuple[int, ...], type_number: int, start: int
) -> GGUFTensor:
    if type_number not in TENSOR_TYPES:
        names = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
        raise UnsupportedModelError(
            f"{path}: tensor {name} has the type number {type_number} of ggml; paxkv reads "
            f"{names}. Use a file with another quantization of the model."
        )
    type_name, block_size, block_bytes = TENSOR_TYPES[type_number]
    if not shape or shape[-1] % block_size:
        raise _bad_file(path, f"tensor {name} ({type_name}) has the shape {list(shape)}")
    num_bytes = math.prod(shape) // block_size * block_bytes
    return GGUFTensor(name=name, type_name=type_name, shape=shape, start=start, num_bytes=num_bytes)


class _Cursor:
    """Takes values one after the other."""

    def __init__(self, data: mmap.mmap, *, position: int) -> None:
        self._data = data
        self.position = position

    def take(self, code: str) -> int | float | bool:
        """Takes a number.

        Args:
            code: Its type in `struct`.
        """
        (value,) = struct.unpack_from(f"<{code}", self._data, self.position)
        self.position += struct.calcsize(f"<{code}")
        return value

    def take_string(self) -> str:
        num_bytes = self.take("Q")
        text = self._take_bytes(num_bytes)
        return text.decode("utf-8")

    def take_value(self, type_number: int) -> object:
        """Takes a value of metadata."""
        if type_number == _STRING:
            return self.take_string()
        if type_number == _ARRAY:
            return self._take_array()
        if type_number not in _SCALARS:
            raise IndexError(f"unknown type {type_number} of metadata")
        return self.take(_SCALARS[type_number])

    def _take_array(self) -> list[object] | np.ndarray:
        type_number, length = self.take("I"), self.take("Q")
        if type_number not in _SCALARS:
            # A false length ends with an error at the end of the file.
            return [self.take_value(type_number) for _ in range(length)]
        dtype = np.dtype(f"<{_SCALARS[type_number]}" if type_number != 7 else "?")
        return np.frombuffer(self._take_bytes(length * dtype.itemsize), dtype)

    def _take_bytes(self, num_bytes: int) -> bytes:
        taken = self._data[self.position : self.position + num_bytes]
        if len(taken) < num_bytes:
            raise IndexError(f"expected {num_bytes:,} bytes at byte {self.position:,}")
        self.position += num_bytes
        return taken


def _bad_file(path: Path, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path} is truncated or malformed: {problem}; it has {path.stat().st_size:,} bytes. "
        "Download it again."
    )
