"""Routes for the operator, enabled by `--enable-admin`."""

from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.errors import EngineDeadError, InvalidRequestError, PaxkvError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.protocol.error_response import ConflictError
from paxkv.server.protocol.request_names import MAX_NAMES, RequestNames
from paxkv.server.routes.json_response import json_response

_AnswerT = TypeVar("_AnswerT")
_RESET, _EXPLAIN = "/reset_prefix_cache", "/explain_prefix_cache_miss"
_START_PROFILE, _STOP_PROFILE = "/start_profile", "/stop_profile"
# These paths need an API key if the server has any.
ADMIN_PATHS = (_RESET, _EXPLAIN, _START_PROFILE, _STOP_PROFILE)


class AdminRoutes:
    """Actions that ordinary clients should not be able to take.

    Args:
        profile_dir: Folder for profiles; None refuses to record any.
    """

    def __init__(
        self, engine: EngineClient, names: RequestNames, *, profile_dir: str | None
    ) -> None:
        self._engine = engine
        self._names = names
        self._profile_dir = profile_dir

    def routes(self) -> list[Route]:
        return [
            Route(_RESET, self.reset_prefix_cache, methods=["POST"]),
            Route(_EXPLAIN, self.explain_prefix_cache_miss, methods=["GET"]),
            Route(_START_PROFILE, self.start_profile, methods=["POST"]),
            Route(_STOP_PROFILE, self.stop_profile, methods=["POST"]),
        ]

    async def reset_prefix_cache(self, request: Request) -> Response:
        """Empties the prefix cache. `?reset_running_requests=true` preempts running requests."""
        is_forced = _flag(request, "reset_running_requests")
        if not await _ask(self._engine.reset_prefix_cache(is_forced)):
            raise ConflictError(
                "the prefix cache was not reset: requests hold blocks of it. Wait until they have "
                "ended, or add ?reset_running_requests=true, which preempts them."
            )
        return json_response({"success": True})

    async def explain_prefix_cache_miss(self, request: Request) -> Response:
        """Explains why the prompts of the call `?request_id=` did not find more cached blocks."""
        name = request.query_params.get("request_id", "")
        engine_ids = self._names.engine_ids(name)
        if not engine_ids:
            raise InvalidRequestError(
                f"request_id={name!r} is not among the last {MAX_NAMES} requests of this server. "
                "Send the value of the X-Request-Id header of the answer.",
                param="request_id",
            )
        misses = [await _ask(self._engine.explain_prefix_cache_miss(i)) for i in engine_ids]
        return json_response({"request_id": name, "prompts": misses})

    async def start_profile(self, _request: Request) -> Response:
        """Starts recording with JAX's profiler in the engine."""
        if self._profile_dir is None:
            raise InvalidRequestError("start the server with --profile-dir to record profiles.")
        if not await _ask(self._engine.start_profile(self._profile_dir)):
            raise ConflictError("a profile is being recorded already; stop it first.")
        return json_response({"profile_dir": self._profile_dir})

    async def stop_profile(self, _request: Request) -> Response:
        """Ends and writes the recording. The engine computes nothing in the meantime."""
        if not await _ask(self._engine.stop_profile()):
            raise ConflictError("no profile is being recorded.")
        return json_response({"profile_dir": self._profile_dir})


async def _ask(answer: Awaitable[_AnswerT]) -> _AnswerT:
    """The engine's answer. An error of the engine becomes a 409 with the error's message."""
    try:
        return await answer
    except (InvalidRequestError, EngineDeadError):
        raise
    except PaxkvError as error:
        raise ConflictError(str(error)) from error


def _flag(request: Request, name: str) -> bool:
    value = request.query_params.get(name, "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r}.", param=name)
    return value in ("true", "1")
