"""Rejects weights that are not finite. A single NaN makes every answer wrong, without an error."""

import numpy as np

from models.errors import CheckpointError

# The second pass over this many numbers reads them from the processor's cache.
_CHUNK = 65_536
# Dtype -> signed and unsigned integers of its size, and the bits of infinity.
_FORMATS = {
    "float16": (np.int16, np.uint16, 0x7C00),
    "bfloat16": (np.int16, np.uint16, 0x7F80),
    "float32": (np.int32, np.uint32, 0x7F80_0000),
    "float64": (np.int64, np.uint64, 0x7FF0_0000_0000_0000),
}


def checked_finite(weight_np: np.ndarray, *, name: str, where: str) -> np.ndarray:
    """Returns `weight_np` itself if all of its numbers are finite.

    The bits of NaN and infinity are the largest integers of their sign: bfloat16 0x7F80 to 0x7FFF,
    and 0xFF80 to 0xFFFF. Two maxima therefore find them: 20 gigabytes per second on one core.
    `isfinite` takes eight times as long for bfloat16 (measured on a server's x86-64 with NumPy 2).

    Args:
        name: The name of the weight, for the message.
        where: The checkpoint or file, for the message.

    Raises:
        CheckpointError: Numbers are NaN or infinite.
    """
    signed, unsigned, infinity = _FORMATS[weight_np.dtype.name]
    flat = weight_np.ravel(order="K")  # no copy of a transposed array
    sign_bit = 1 << (8 * flat.itemsize - 1)
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        is_bad = (
            chunk.view(signed).max() >= infinity
            or chunk.view(unsigned).max() >= sign_bit | infinity
        )
        if is_bad:
            with np.errstate(invalid="ignore"):  # bfloat16 warns about NaN
                num_bad = flat.size - int(np.count_nonzero(np.isfinite(flat)))
            raise CheckpointError(
                f"{where}: {num_bad} of the {flat.size} numbers in weight {name!r} are NaN or "
                "infinite; all numbers must be finite. Download the checkpoint again, or save it "
                "again in a wider dtype."
            )
    return weight_np
