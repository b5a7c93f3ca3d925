"""Request bodies: read within a size limit, decoded, and checked against a struct."""

import asyncio
import codecs
import re
import sys
import typing
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from starlette.requests import Request

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.error_response import BodyTooLargeError, UnsupportedMediaTypeError

_ReadT = TypeVar("_ReadT")
_StructT = TypeVar("_StructT", bound=msgspec.Struct)
# msgspec says "Expected `int | null`, got `str` - at `$.max_tokens`".
_MSGSPEC_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>.*)`)?$", re.DOTALL)
# Limit on objects, arrays and keys of one body together.
MAX_PARTS = 50_000
MAX_STRINGS = 200_000
# Handing a body to a thread takes as long as reading a body of this size.
_SHORT_BODY_BYTES = 32 * 2**10
# An oversized body is received and discarded up to this multiple of the limit. A client that is cut
# off while it sends would see a broken connection instead of the 413.
_DISCARD_FACTOR = 4
# Some clients put the charset into the header Content-Encoding.
_PLAIN_ENCODINGS = frozenset({"", "identity", "utf-8", "utf8"})


async def read_body(
    request: Request, read: Callable[[dict[str, object]], _ReadT], *, max_body_bytes: int
) -> _ReadT:
    """Receives the body of a request, which must be a JSON object, and converts it with `read`.

    A long body is read in a thread, because lists of a million token ids are iterated several
    times. `deadline_protocol.py` limits the time in which a body must arrive.

    Raises:
        UnsupportedMediaTypeError: The content type is not JSON, or the body is compressed.
            Browsers let web pages send bodies of other types to any server. This check stops them.
        BodyTooLargeError: The body is longer than `max_body_bytes`.
        InvalidRequestError: The body is not a JSON object, or `read` raised it.
    """
    content_type = request.headers.get("content-type", "")
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise UnsupportedMediaTypeError(
            f"the body must be JSON, got {content_type=}; send 'Content-Type: application/json'."
        )
    # The header may occur several times.
    content_encoding = ", ".join(request.headers.getlist("content-encoding"))
    if not _PLAIN_ENCODINGS.issuperset(re.split(r"[\s,]+", content_encoding.lower())):
        raise UnsupportedMediaTypeError(
            f"content_encoding must be identity or absent, got {content_encoding!r}; send the body "
            "as it is, not compressed."
        )
    body = await read_limited(request, max_body_bytes)
    if len(body) <= _SHORT_BODY_BYTES:
        return read(decode_object(body))
    return await asyncio.to_thread(lambda: read(decode_object(body)))


def _nearest_float(text: str) -> float:
    """1.8e308 -> 1.7976931348623157e308"""
    return max(min(float(text), sys.float_info.max), -sys.float_info.max)


_DECODER_OF_LARGE_NUMBERS = msgspec.json.Decoder(float_hook=_nearest_float)


def decode_object(body: bytes) -> dict[str, object]:
    """Decodes the JSON object in `body`.

    Raises:
        InvalidRequestError: `body` is not JSON, or not an object, or has too many parts.
    """
    # Some editors and shells write a byte order mark into files, which clients then send.
    value = decode_json(body.removeprefix(codecs.BOM_UTF8), name="the body")
    if not isinstance(value, dict):
        raise InvalidRequestError(f"the body must be a JSON object, got {_json_type(value)}.")
    return value


def decode_json(text: bytes, *, name: str = "it", clips_numbers: bool = True) -> object:
    """Decodes a client's JSON.

    Args:
        name: The text's name in errors.
        clips_numbers: Replace a number that is too large for float64 by the largest one. Otherwise
            such a number is an error.

    Raises:
        InvalidRequestError: The text is not JSON, or has too many parts.
    """
    _check_num_parts(text, name)
    try:
        try:
            return msgspec.json.decode(text)
        except msgspec.ValidationError:
            if not clips_numbers:
                raise
            # JSON numbers may be too large for float64. Some schemas have the maximum 1.8e308.
            return _DECODER_OF_LARGE_NUMBERS.decode(text)
    except RecursionError:
        raise InvalidRequestError(f"{name} is nested too deeply.") from None
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"{name} is not UTF-8: {error.reason}.") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(
            f"{name} is not valid JSON: {error}. Numbers must be finite, and strings must not "
            "contain half a surrogate pair."
        ) from None


def _check_num_parts(body: bytes, name: str) -> None:
    """Limits the objects that the decoder makes, because it cannot be interrupted.

    A million empty lists would take half a second, most of it in the garbage collector. Numbers
    need no limit: two million take 30 ms.
    """
    if _num_parts(body) <= MAX_PARTS and body.count(b'"') <= 2 * MAX_STRINGS:
        return
    # Strings may contain the same signs, so the parts are counted again without their contents.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    has_few_strings = plain.count(b'"') <= 2 * MAX_STRINGS
    if has_few_strings and _num_parts(b"".join(plain.split(b'"')[::2])) <= MAX_PARTS:
        return
    raise InvalidRequestError(
        f"{name} has too many parts; it may have {MAX_PARTS} objects, arrays and keys together, "
        f"and {MAX_STRINGS} strings."
    )


def _num_parts(text: bytes) -> int:
    """Counts objects, arrays and keys of JSON, and the same signs in its strings."""
    return text.count(b"{") + text.count(b"[") + text.count(b":")


def convert_fields(fields: Mapping[str, object], struct_type: type[_StructT]) -> _StructT:
    """Converts `fields` to a struct; fields that the struct does not have are ignored.

    Raises:
        InvalidRequestError: A field is missing or has the wrong type; `param` names it.
    """
    try:
        return msgspec.convert({name: _whole(v) for name, v in fields.items()}, struct_type)
    except msgspec.ValidationError as error:
        match = _MSGSPEC_PLACE.match(str(error))
        assert match is not None
        path = (match["path"] or "").removeprefix("$").removeprefix(".")
        what = match["what"].replace("`", "").replace("Expected", "expected")
        what = what.replace("Object missing required field", "missing required field")
        what = what.replace("Invalid enum value", f"expected {_choices(struct_type, path)}, got")
        raise InvalidRequestError(
            f"{path}: {what}." if path else f"{what}.",
            param=re.split(r"[.\[]", path)[0] or _missing_field(what),
        ) from None


def _whole(value: object) -> object:
    """16.0 -> 16, as in vLLM, for clients that have only floats. A float field accepts both."""
    is_whole = type(value) is float and value.is_integer() and abs(value) < 2**53
    return int(value) if is_whole else value


def _choices(struct_type: type, path: str) -> str:
    """The values of a field of type Literal, or of an optional one."""
    field_type = typing.get_type_hints(struct_type).get(path)
    literals = [t for t in (field_type, *typing.get_args(field_type)) if _is_literal(t)]
    values = [str(value) for literal in literals for value in typing.get_args(literal)]
    return " or ".join(values) or "another value"


def _is_literal(field_type: object) -> bool:
    return typing.get_origin(field_type) is typing.Literal


def _missing_field(what: str) -> str | None:
    return what.split()[-1] if what.startswith("missing required field") else None


async def read_limited(request: Request, max_body_bytes: int) -> bytes:
    """Receives a body of any kind.

    Raises:
        BodyTooLargeError: It is longer than `max_body_bytes`.
    """
    content_length = int(request.headers.get("content-length", "0"))
    if content_length > max_body_bytes * _DISCARD_FACTOR:
        raise _too_large(max_body_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    async for chunk in request.stream():
        num_bytes += len(chunk)
        if num_bytes > max_body_bytes * _DISCARD_FACTOR:
            break
        if num_bytes <= max_body_bytes:
            chunks.append(chunk)
    if num_bytes > max_body_bytes:
        raise _too_large(max_body_bytes)
    return b"".join(chunks)


def _too_large(max_body_bytes: int) -> BodyTooLargeError:
    return BodyTooLargeError(
        f"the body is longer than {max_body_bytes} bytes; send less, or start the server with a "
        "larger --max-body-bytes."
    )


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
