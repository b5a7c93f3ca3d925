"""Messages between the processes of one engine: calls of programs, and values at the start.

A message has a version (1 byte), a digest (16 bytes) and a body in msgpack. The digest covers the
body. Each body has a number, which counts the messages from its sender to its receiver. JAX does
not notice if processes pass different arrays to a program: the tokens would be wrong. So a process
ends if a digest or a number is wrong.
"""

import hashlib
from typing import Literal, Self

import msgspec
import numpy as np

from paxkv.errors import EngineDeadError

VERSION = 2
_DIGEST_BYTES = 16

CallName = Literal[
    "write_row", "write_slots", "copy_blocks", "run_step", "run_burst", "draw", "draft"
]


class HostArray(msgspec.Struct, frozen=True, array_like=True):
    """An int32 array as bytes, in the byte order of the host. All hosts are little-endian."""

    dims: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array_np: np.ndarray) -> Self:
        if array_np.dtype != np.int32:
            raise TypeError(f"a call's array must have int32, got {array_np.dtype}.")
        return cls(array_np.shape, array_np.tobytes())

    @property
    def array_np(self) -> np.ndarray:
        return np.frombuffer(self.data, np.int32).reshape(self.dims)


class Call(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A call of a method of `Worker`.

    Args:
        shape_idx: Index of the program's shape in `StepBuckets.largest_first`; -1 if the method has
            no shape.
        array: The method's array; None if `draw` has no mask.
        leaves_logits: See `Worker.run_burst`.
        table_idx: See `Worker.write_slots`.
    """

    name: CallName
    shape_idx: int = -1
    array: HostArray | None = None
    leaves_logits: bool = False
    table_idx: int = 0


class Join(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A follower's first message."""

    rank: int


class Value(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A rank's value of a named decision."""

    name: str
    value: str | int


class Values(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The values of all ranks, in the order of ranks."""

    name: str
    values: tuple[str | int, ...]


class End(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The leader was shut down, so the followers end."""


Body = Call | Join | Value | Values | End
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(tuple[int, Body])


class RankMessageError(EngineDeadError):
    """A message that is damaged, lost, repeated or of another version."""


def encode(number: int, body: Body) -> bytes:
    """Encodes the message with this number."""
    data = _ENCODER.encode((number, body))
    return bytes([VERSION]) + _digest(data) + data


def decode(message: bytes, *, number: int, sender: str) -> Body:
    """Decodes the message that must have this number.

    Args:
        sender: The name of the sender in error messages.

    Raises:
        RankMessageError: The message is not the one that was sent, or not the next one.
    """
    if not message or message[0] != VERSION:
        found = message[0] if message else "none"
        raise RankMessageError(
            f"message {number} from {sender} has version {found}; this process has version "
            f"{VERSION}. Install the same paxkv on all hosts."
        )
    digest, data = message[1 : 1 + _DIGEST_BYTES], message[1 + _DIGEST_BYTES :]
    if digest != _digest(data):
        raise RankMessageError(
            f"message {number} from {sender} is damaged: its {len(data)} bytes do not have the "
            "digest that came with them. The engine's processes end, because they would compute "
            "different steps."
        )
    try:
        found, body = _DECODER.decode(data)
    except msgspec.MsgspecError as error:
        raise RankMessageError(f"message {number} from {sender} is unknown: {error}.") from error
    if found != number:
        raise RankMessageError(
            f"expected message {number} from {sender}, got message {found}. A message was lost or "
            "repeated, so the engine's processes end."
        )
    return body


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()
