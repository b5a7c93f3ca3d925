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

# For logs and metrics, because the client has disconnected. nginx uses the same number.
CLIENT_CLOSED_REQUEST = 499


class UnknownModelError(InvalidRequestError):
    """The request names a model that this server does not have."""

    http_status = 404


class UnknownResponseError(InvalidRequestError):
    """The request names a response of /v1/responses that is not stored."""

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
    """The request has none of the server's API keys."""

    http_status = 401


class ConflictError(InvalidRequestError):
    """The request cannot be executed in the current state of the server."""

    http_status = 409


class OverloadedError(PaxkvError):
    """Too many requests run or wait."""

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
# Errors whose messages are sent to clients, although the request is not at fault.
_PUBLIC_ERRORS = (
    *(ChatTemplateError, EngineDeadError, EngineStalledError),
    *(OverloadedError, SlowReaderError),
)
# Headers of the responses to some errors.
_HEADERS: dict[type[Exception], dict[str, str]] = {
    UnauthorizedError: {"WWW-Authenticate": "Bearer"},
    # A place may be free when the next request ends. The header allows only whole seconds.
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
    """JSON of an error. Statuses from 500 on are the server's fault, others the client's."""
    error_type = "server_error" if status >= 500 else "invalid_request_error"
    # A message may quote text of the client that is not valid Unicode, which cannot be encoded.
    message = message.encode("utf-8", "replace").decode("utf-8")
    return msgspec.json.encode(
        ErrorBody(ErrorDetail(message=message, type=error_type, param=param, code=code))
    )


def describe_error(error: Exception) -> tuple[int, bytes]:
    """HTTP status and body of an error. An error that is not for clients is logged instead."""
    if isinstance(error, InvalidRequestError):
        code = _CODES.get(type(error))
        return error.http_status, error_body(
            error.http_status, str(error), param=error.param, code=code
        )
    if isinstance(error, _PUBLIC_ERRORS):
        code = _CODES.get(type(error))
        return error.http_status, error_body(error.http_status, str(error), code=code)
    _logger.error("request failed", exc_info=error)
    return 500, error_body(500, _INTERNAL_MESSAGE, code="internal_error")


def error_response(error: Exception) -> Response:
    """The HTTP response for an error."""
    status, body = describe_error(error)
    headers = dict(_HEADERS.get(type(error), {}))
    if isinstance(error, EngineDeadError) and error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    return Response(body, status, headers=headers, media_type="application/json")


async def handle_paxkv_error(_request: Request, error: Exception) -> Response:
    """Starlette handler for errors that paxkv raises on purpose."""
    return error_response(error)


async def handle_http_error(request: Request, error: Exception) -> Response:
    """Starlette handler for unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    method, path = request.method, request.url.path
    messages = {
        404: f"there is nothing at {path}.",
        405: f"{path} does not accept {method}; it accepts {(error.headers or {}).get('Allow')}.",
    }
    message = messages.get(error.status_code, str(error.detail))
    return Response(
        error_body(error.status_code, message),
        error.status_code,
        headers=dict(error.headers or {}),
        media_type="application/json",
    )


async def handle_disconnect(_request: Request, _error: Exception) -> Response:
    """Starlette handler for a client that disconnects before its request is complete."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def handle_bug(_request: Request, _error: Exception) -> Response:
    """Starlette handler for all other errors. Starlette then raises the error, which logs it.

    uvicorn closes the connection when the error reaches it. The header announces this, because a
    client that used the connection again would find it reset.
    """
    return Response(
        error_body(500, _INTERNAL_MESSAGE, code="internal_error"),
        500,
        headers={"Connection": "close"},
        media_type="application/json",
    )
