"""Paths with a slash too many, which clients make of a base URL that ends with one."""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("/{2,}")
# A model's name follows, which may be a path itself.
_MODELS = "/v1/models/"


class PlainPathMiddleware:
    """Serves "/v1/messages/" and "//v1/messages" as "/v1/messages".

    A redirect would lose the body of the request. Every later layer sees the plain path; the access
    log shows the one that was sent.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["path"] = plain_path(scope["path"], scope.get("root_path", ""))
        await self._app(scope, receive, send)


def plain_path(path: str, root_path: str = "") -> str:
    """The path without doubled slashes and without one at its end.

    Args:
        root_path: What a proxy has in front of all paths; a slash after it is a path.
    """
    front, models, name = path.partition(_MODELS)
    if models and name and front in ("", root_path):
        return path
    plain = _SLASHES.sub("/", path).rstrip("/")
    return plain if plain.removeprefix(root_path) else f"{plain}/"
