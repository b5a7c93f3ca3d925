"""`MappedTensors`: the tensors of one safetensors file, without a copy of them."""

import json
import math
import mmap
import sys
from pathlib import Path

import ml_dtypes
import numpy as np

from models.errors import CheckpointError

_DTYPES = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
# The file begins with the length of its header, which has this many bytes.
_LENGTH_BYTES = 8


class MappedTensors:
    """Gives views of the mapped file.

    `safetensors` itself copies each tensor into new memory, which takes time on one processor
    (docs/design/cpu.md).

    Args:
        path: A file whose header `safetensors` has checked.
    """

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            num_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            self._header = json.loads(file.read(num_bytes))
        self._path = path
        self._start = _LENGTH_BYTES + num_bytes
        self._map: mmap.mmap | None = None

    def read(self, name: str) -> np.ndarray:
        """Returns a tensor, which cannot be written to.

        Raises:
            CheckpointError: The tensor has a dtype that is not in `_DTYPES`.
        """
        tensor = self._header[name]
        dtype, shape = _DTYPES.get(tensor["dtype"]), tuple(tensor["shape"])
        if dtype is None:
            raise CheckpointError(
                f"{self._path}: weight {name!r} has the dtype {tensor['dtype']}; paxkv reads "
                f"{', '.join(_DTYPES)}."
            )
        if math.prod(shape) == 0:
            return np.empty(shape, dtype)
        if self._map is None:
            with self._path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        start, _ = tensor["data_offsets"]
        array_np = np.frombuffer(self._map, dtype, math.prod(shape), self._start + start)
        return array_np.reshape(shape)

    def release(self, name: str) -> None:
        """Takes the tensor's pages out of the memory of this process.

        The system reads them again from the file if a view of the tensor is used later.
        """
        if self._map is not None:
            start, end = (self._start + offset for offset in self._header[name]["data_offsets"])
            release_pages(self._map, start, end)


def release_pages(mapped: mmap.mmap, start: int, end: int) -> None:
    """Takes the pages of a part of a mapped file out of the memory of this process, on Linux."""
    start -= start % mmap.PAGESIZE
    if end > start and sys.platform.startswith("linux"):
        mapped.madvise(mmap.MADV_DONTNEED, start, end - start)
