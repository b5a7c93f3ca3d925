"""Removes surplus slashes from paths, which clients add if their base URL ends with a slash."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")
# A model's name follows, which may contain slashes.
_MODELS = "/v1/models/"


class PlainPathMiddleware:
    """Serves "/v1/messages/" and "//v1/messages" as "/v1/messages".

    A redirect would lose the body of the request. All inner layers see the plain path, except that
    the access log shows the one that was sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = plain_path(scope["path"], scope.get("root_path", ""))
        await self._app(scope, receive, send)


def plain_path(path: str, root_path: str = "") -> str:
    """The path without doubled slashes, and without a slash at its end.

    Args:
        root_path: The proxy's path prefix. A single slash after it is kept.
    """
    front, models, name = path.partition(_MODELS)
    if models and name and front in ("", root_path):
        return path
    plain = _SLASHES.sub("/", path).rstrip("/")
    return plain if plain.removeprefix(root_path) else f"{plain}/"
