"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

import logging

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paxkv.errors import (
    ChatTemplateError,
    EngineDeadError,
    EngineStalledError,
    InvalidRequestError,
    NeverFitsError,
    PaxkvError,
    PromptTooLongError,
    SlowReaderError,
    UnsupportedFeatureError,
)

_logger = logging.getLogger(__name__)

# The client is gone, so nobody reads this status; nginx uses the same number in its logs.
CLIENT_CLOSED_REQUEST = 499


class UnknownModelError(InvalidRequestError):
    """The request names a model that this server does not have."""

    http_status = 404


class UnknownResponseError(InvalidRequestError):
    """The request names an answer of /v1/responses that is not stored."""

    http_status = 404


class BodyTooLargeError(InvalidRequestError):
    """The request body is over `--max-body-bytes`."""

    http_status = 413


class UnsupportedMediaTypeError(InvalidRequestError):
    """The request body is not declared to be JSON."""

    http_status = 415


class HeadersTooLargeError(InvalidRequestError):
    """The request's headers are over `--max-header-bytes`."""

    http_status = 431


class UnauthorizedError(InvalidRequestError):
    """The request brings none of the server's API keys."""

    http_status = 401


class ConflictError(InvalidRequestError):
    """What is asked for cannot be done now."""

    http_status = 409


class OverloadedError(PaxkvError):
    """As many requests wait as may."""

    http_status = 503


_CODES: dict[type[PaxkvError], str] = {
    UnknownModelError: "model_not_found",
    UnknownResponseError: "response_not_found",
    BodyTooLargeError: "body_too_large",
    UnsupportedMediaTypeError: "unsupported_media_type",
    HeadersTooLargeError: "headers_too_large",
    UnauthorizedError: "invalid_api_key",
    PromptTooLongError: "context_length_exceeded",
    NeverFitsError: "context_length_exceeded",
    UnsupportedFeatureError: "unsupported_parameter",
    EngineDeadError: "engine_dead",
    EngineStalledError: "engine_stalled",
    OverloadedError: "overloaded",
    ChatTemplateError: "chat_template_error",
    SlowReaderError: "slow_reader",
}
# Their messages are for callers, though the request is not at fault.
_TOLD_ERRORS = (
    *(ChatTemplateError, EngineDeadError, EngineStalledError),
    *(OverloadedError, SlowReaderError),
)
# Statuses that come with a header.
_HEADERS: dict[type[Exception], dict[str, str]] = {
    UnauthorizedError: {"WWW-Authenticate": "Bearer"},
    # A place may be free with the next request that ends. Seconds are whole here.
    OverloadedError: {"Retry-After": "1"},
}
_INTERNAL_MESSAGE = "internal error of the server; its log says more."


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


def error_body(
    status: int, message: str, *, param: str | None = None, code: str | None = None
) -> bytes:
    """JSON of an error; statuses from 500 on are the server's fault, the others the caller's."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    # A message may quote what the caller sent; what is not valid Unicode cannot be sent back.
    message = message.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(
        ErrorBody(ErrorDetail(message=message, type=error_type, param=param, code=code))
    )


def describe_error(error: Exception) -> tuple[int, bytes]:
    """HTTP status and body of an error; one that is not meant for callers is logged instead."""
    if isinstance(error, InvalidRequestError):
        code = _CODES.get(type(error))
        return error.http_status, error_body(
            error.http_status, str(error), param=error.param, code=code
        )
    if isinstance(error, _TOLD_ERRORS):
        code = _CODES.get(type(error))
        return error.http_status, error_body(error.http_status, str(error), code=code)
    _logger.error("request failed", exc_info=error)
    return 500, error_body(500, _INTERNAL_MESSAGE, code="internal_error")


def error_response(error: Exception) -> Response:
    """The HTTP response that an error becomes."""
    status, body = describe_error(error)
    headers = dict(_HEADERS.get(type(error), {}))
    if isinstance(error, EngineDeadError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(body, status, headers=headers, media_type="application/json")


async def handle_paxkv_error(_request: Request, error: Exception) -> Response:
    """Starlette handler of everything that paxkv raises on purpose."""
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler of unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    messages = {
        404: f"there is nothing at {path}.",
        405: f"{path} does not take {method}; it takes {(error.headers or {}).get('Allow')}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    return Response(
        error_body(error.status_code, message),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """Starlette handler of a client that left before its request was complete."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_bug(_request: Request, _error: Exception) -> Response:
    """Starlette handler of the rest; Starlette raises it again afterwards, which logs it.

    uvicorn closes the connection once an error reaches it, so the answer says it will: a client
    that used the connection again would find it reset.
    """
    return Response(
        error_body(500, _INTERNAL_MESSAGE, code="internal_error"),
        500,
        headers={"Connection": "close"},
        media_type="application/json",
    )
