"""The channel between a client and an engine: Protocols of the client's end, and messages as bytes.

Messages are msgpack with the class name in front, so that only messages can cross.
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
    """The client's end of the message channel to an engine core; safe from any thread."""

    def send(self, message: EngineInput) -> None:
        """Queues a message.

        Raises:
            EngineDeadError: The engine has ended.
        """
        ...

    def receive(self, timeout_s: float | None = None) -> EngineOutput | None:
        """Next message from the engine; None when `timeout_s` passed without one."""
        ...

    def close(self) -> None:
        """Ends the channel and waits for the engine to stop."""
        ...


class LoopTransport(Protocol):
    """The same for a client on an asyncio loop, which is called instead of waiting.

    Whoever starts engines again where one died says `EngineReady` each time one takes the place of
    the last.
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
        """Why the engine makes no progress although it has work; None if it does, or has ended.

        Read on the loop.
        """
        ...

    def give_up(self, reason: str) -> None:
        """Takes the engine for dead, because its messages cannot be used. Called on the loop.

        `on_message` hears `EngineDead`, and what comes of it, as if the engine had died.
        """
        ...

    def close(self) -> None:
        """As `EngineTransport.close`; called from another thread than the loop's."""
        ...


_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_INPUT_DECODERS = {cls.__name__: msgspec.msgpack.Decoder(cls) for cls in get_args(EngineInput)}
_OUTPUT_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls) for cls in get_args(EngineOutput | EngineStartOutput)
}


def encode(message: EngineInput | EngineOutput | EngineStartOutput) -> bytes:
    """Bytes of a message; `decode_input` and `decode_output` are its inverses."""
    return _ENCODER.encode((type(message).__name__, message))


def decode_input(data: bytes) -> EngineInput:
    """The client's message in `data`.

    Raises:
        InvariantError: The bytes are not a message of this version.
    """
    return _decode(data, _INPUT_DECODERS)


def decode_output(data: bytes) -> EngineOutput | EngineStartOutput:
    """The engine's message in `data`.

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
