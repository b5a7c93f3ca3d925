"""Messages as bytes: msgpack with the class name in front, so that only messages can cross."""

import typing

import msgspec

from paxkv.contracts.engine_output import EngineOutput
from paxkv.contracts.engine_request import EngineInput
from paxkv.contracts.engine_start import EngineStartOutput
from paxkv.errors import InvariantError

_ENCODER = msgspec.msgpack.Encoder()
_HEADER_DECODER = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])
_INPUT_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls) for cls in typing.get_args(EngineInput)
}
_OUTPUT_DECODERS = {
    cls.__name__: msgspec.msgpack.Decoder(cls)
    for cls in typing.get_args(EngineOutput | EngineStartOutput)
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
