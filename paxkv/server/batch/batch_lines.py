"""Lines of batch files: the requests of an input file, and the rows of an output file."""

import codecs
from typing import TypeVar

import msgspec

from paxkv.errors import InvalidRequestError

# Paths of the requests that a batch may contain.
BATCH_URLS = ("/v1/chat/completions", "/v1/completions")
_FIELDS = "custom_id, method, url and body"
_DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_ValueT = TypeVar("_ValueT")


class BatchLineError(InvalidRequestError):
    """A line of the input is not a request that can be sent.

    Attributes:
        custom_id: The line's id; None if it cannot be read.
    """

    custom_id: str | None = None


class BatchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the input.

    Args:
        body: JSON exactly as in the line. The route checks it.
    """

    custom_id: str
    url: str
    body: bytes


class BatchResponse(msgspec.Struct, frozen=True, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw | None


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the output, with the same fields as in vLLM.

    Args:
        custom_id: The input line's id; None if it cannot be read.
        error: None if the request succeeded. Otherwise the body of the error, and `response.body`
            is None.
    """

    id: str
    custom_id: str | None
    response: BatchResponse
    error: msgspec.Raw | None


class _StreamField(msgspec.Struct):
    stream: bool | None = None


class BatchLineReader:
    """Reads the lines of one input file. Each custom_id may be used once."""

    def __init__(self) -> None:
        self._custom_ids: set[str] = set()

    def read(self, line: bytes, line_number: int) -> BatchRequest:
        """Reads the request in a line.

        Raises:
            BatchLineError: The line is not a JSON object, lacks a field, repeats the custom_id of
                an earlier line, or has a method, url or stream that a batch does not support.
        """
        fields = _decode(
            # Some editors write a byte order mark before the first line.
            line.removeprefix(codecs.BOM_UTF8),
            dict[str, msgspec.Raw],
            f"line {line_number} must be a JSON object with {_FIELDS}",
        )
        custom_id = _string(fields, "custom_id", line_number)
        try:
            self._add_custom_id(custom_id, line_number)
            return _request(custom_id, fields, line_number)
        except BatchLineError as error:
            error.custom_id = custom_id
            raise

    def _add_custom_id(self, custom_id: str, line_number: int) -> None:
        if custom_id in self._custom_ids:
            raise BatchLineError(
                f"custom_id {custom_id!r} of line {line_number} was used by an earlier line; give "
                "each line its own.",
                param="custom_id",
            )
        self._custom_ids.add(custom_id)


def _request(custom_id: str, fields: dict[str, msgspec.Raw], line_number: int) -> BatchRequest:
    method = _string(fields, "method", line_number)
    if method != "POST":
        raise BatchLineError(
            f"method of line {line_number} must be POST, got {method!r}.", param="method"
        )
    url = _string(fields, "url", line_number)
    if url not in BATCH_URLS:
        raise BatchLineError(
            f"url of line {line_number} must be {' or '.join(BATCH_URLS)}, got {url!r}.",
            param="url",
        )
    body = bytes(_field(fields, "body", line_number))
    if _is_stream(body):
        raise BatchLineError(
            f"the body of line {line_number} has stream=true, and a batch has no streams; leave "
            "stream out.",
            param="stream",
        )
    return BatchRequest(custom_id=custom_id, url=url, body=body)


def _field(fields: dict[str, msgspec.Raw], name: str, line_number: int) -> msgspec.Raw:
    if name not in fields:
        raise BatchLineError(
            f"line {line_number} has no {name}; a line needs {_FIELDS}.", param=name
        )
    return fields[name]


def _string(fields: dict[str, msgspec.Raw], name: str, line_number: int) -> str:
    text = _field(fields, name, line_number)
    return _decode(text, str, f"{name} of line {line_number} must be a string", param=name)


def _decode(
    text: bytes | msgspec.Raw, value_type: type[_ValueT], message: str, *, param: str | None = None
) -> _ValueT:
    try:
        return msgspec.json.decode(text, type=value_type)
    except _DECODE_ERRORS as error:
        raise BatchLineError(f"{message}: {error}.", param=param) from None


def _is_stream(body: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(body, type=_StreamField).stream)
    except _DECODE_ERRORS:
        # The route reports what is wrong with the body.
        return False
