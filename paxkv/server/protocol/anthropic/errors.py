"""Errors in Anthropic's form, translated from the form that all other routes use."""

import msgspec

from paxkv.server.protocol.anthropic.bodies import AnthropicErrorBody, AnthropicErrorDetail
from paxkv.server.protocol.error_response import ErrorBody

# Anthropic's status of a server that has too many requests; other routes use 503.
OVERLOADED_STATUS = 529
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
}


def anthropic_error(
    status: int, body: bytes, *, request_id: str
) -> tuple[int, AnthropicErrorBody] | None:
    """Status and body of an error in Anthropic's form.

    Args:
        status: HTTP status that the other routes use for this error.
        body: JSON of an `ErrorBody`.

    Returns:
        None if `body` is not the JSON of an `ErrorBody`.
    """
    try:
        error = msgspec.json.decode(body, type=ErrorBody).error
    except msgspec.MsgspecError:
        return None
    if error.code == "overloaded":
        status, kind = OVERLOADED_STATUS, "overloaded_error"
    else:
        kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    detail = AnthropicErrorDetail(type=kind, message=error.message)
    return status, AnthropicErrorBody(error=detail, request_id=request_id)
