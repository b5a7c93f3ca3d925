"""API keys: rejects requests without a valid key, in a time that does not depend on the key."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paxkv.server.protocol.error_response import UnauthorizedError, error_response
from paxkv.server.routes.route_path import is_below, route_path


class ApiKeyMiddleware:
    """Requires a key for paths that begin with /v1, as in vLLM, and for further paths.

    A request's key is compared with the digests of all keys, so the response time shows neither
    the length of a key nor how much of a wrong key is right.

    Args:
        api_keys: At least one.
        other_paths: Further paths that require a key, as do the paths below them.
        x_api_key_paths: These paths, and the paths below them, also accept a key in the header
            `x-api-key`, where Anthropic's clients send it.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: Sequence[str],
        other_paths: Collection[str] = (),
        x_api_key_paths: Collection[str] = (),
    ) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._other_paths = frozenset(other_paths)
        self._x_api_key_paths = frozenset(x_api_key_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._needs_key(scope):
            await self._app(scope, receive, send)
            return
        takes_x_api_key = any(is_below(route_path(scope), p) for p in self._x_api_key_paths)
        if self._has_key(scope) or (takes_x_api_key and self._has_x_api_key(scope)):
            await self._app(scope, receive, send)
            return
        other_way = " or 'x-api-key: KEY'" if takes_x_api_key else ""
        error = UnauthorizedError(
            "the API key is missing or wrong; send one of the server's keys as "
            f"'Authorization: Bearer KEY'{other_way}."
        )
        await error_response(error)(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        path = route_path(scope)
        return path.startswith("/v1") or any(is_below(path, other) for other in self._other_paths)

    def _has_key(self, scope: Scope) -> bool:
        scheme, _, key = _header(scope, b"authorization").partition(b" ")
        return self._is_known(key) and scheme.lower() == b"bearer"

    def _has_x_api_key(self, scope: Scope) -> bool:
        return self._is_known(_header(scope, b"x-api-key"))

    def _is_known(self, key: bytes) -> bool:
        digest = hashlib.sha256(key.strip()).digest()
        # A list, because `any` over a generator would stop at the first key that matches.
        return any([hmac.compare_digest(digest, known) for known in self._digests])


def _header(scope: Scope, name: bytes) -> bytes:
    """The first header of this name; empty if there is none."""
    return next((value for header, value in scope["headers"] if header == name), b"")
