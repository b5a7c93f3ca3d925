"""API keys: who has none of them gets a 401, after the same work as who has one."""

import hashlib
import hmac
from collections.abc import Collection, Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from paxkv.server.protocol.error_response import UnauthorizedError, error_response
from paxkv.server.routes.route_path import route_path


class ApiKeyMiddleware:
    """Asks for a key in front of /v1, as vLLM does, and of the paths that are named besides.

    Keys are compared by their digests, all of them each time, so that neither a key's length nor
    how far a wrong one agrees shows in the time it takes.

    Args:
        api_keys: At least one.
        other_paths: That need one too, and what lies under them.
    """

    def __init__(
        self, app: ASGIApp, *, api_keys: Sequence[str], other_paths: Collection[str] = ()
    ) -> None:
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in api_keys]
        self._other_paths = frozenset(other_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._needs_key(scope) and not self._has_key(scope):
            error = UnauthorizedError(
                "the API key is missing or wrong; send one of the server's as "
                "'Authorization: Bearer KEY'."
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        path = route_path(scope)
        is_other = any(path == other or path.startswith(f"{other}/") for other in self._other_paths)
        return path.startswith("/v1") or is_other

    def _has_key(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        # A list: `any` over a generator would stop at the one that fits.
        is_one = any([hmac.compare_digest(digest, known) for known in self._digests])
        return is_one and scheme.lower() == b"bearer"
