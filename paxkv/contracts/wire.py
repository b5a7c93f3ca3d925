"""The channel between a client and an engine: Protocols of the client's end, and the encoding.

A message is encoded as msgpack with its class name, so that only known messages can be decoded.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol, get_args

import msgspec

from paxkv.contracts.engine_output import EngineOutput
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.engine_start import EngineReady, EngineStartOutput
from paxkv.errors import InvariantError


class EngineTransport(Protocol):
    """The client's end of the message channel to an engine core. All methods are thread-safe."""

    def send(self, message: EngineInput) -> None:
        """Queues a message.

        Raises:
            EngineDeadError: The engine has ended.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> EngineOutput | None:
        """The next message from the engine; None if none arrived within `timeout_s`."""
        ...

    def close(self) -> None:
        """Ends the channel and waits for the engine to stop."""
        ...


class LoopTransport(Protocol):
    """A channel for a client on an asyncio loop: it calls the client for every message.

    A transport that replaces dead engines delivers `EngineReady` for each new engine.
    """

    def send(self, message: EngineInput) -> None:
        """As `EngineTransport.send`."""
        ...

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """Calls `on_message` on the loop with every message from now on."""
        ...

    @property
    def stall(self) -> str | None:
        """Why the engine makes no progress on its work; None if it does, or has ended.

        Must be read on the loop.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Treats the engine as dead, because its messages cannot be used. Call it on the loop.

        `on_message` receives the same messages as if the engine had died, first `EngineDead`.
        """
        ...

    def close(self) -> None:
        """As `EngineTransport.close`. Must not be called on the loop's thread."""
        ...


_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_INPUT_DECODERS = {cls.__name__: msgspec.msgpack.Decoder(cls) for cls in get_args(EngineInput)}
_OUTPUT_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls) for cls in get_args(EngineOutput | EngineStartOutput)
}


def encode(message: EngineInput | EngineOutput | EngineStartOutput) -> bytes:
    """Encodes a message; `decode_input` and `decode_output` decode it."""
    return _ENCODER.encode((type(message).__name__, message))


def decode_input(data: bytes) -> EngineInput:
    """Decodes a message from a client.

    Raises:
        InvariantError: The bytes are not a message of this version.
    """
    return _decode(data, _INPUT_DECODERS)


def decode_output(data: bytes) -> EngineOutput | EngineStartOutput:
    """Decodes a message from an engine.

    Raises:
        InvariantError: The bytes are not a message of this version.
    """
    return _decode(data, _OUTPUT_DECODERS)


def _decode(
    data: bytes, decoders: dict[str, msgspec.msgpack.Decoder]
) -> EngineInput | EngineOutput | EngineStartOutput:
    try:
        name, body = _HEADER_DECODER.decode(data)
        return decoders[name].decode(body)
    except (msgspec.MsgspecError, KeyError) as error:
        raise InvariantError(f"not a message of this version: {error!r}") from error
