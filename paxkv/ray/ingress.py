"""`Ingress`: receives HTTP requests and relays them to replicas."""

import functools
from collections.abc import Collection

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import Response

from paxkv.errors import EngineDeadError, PaxkvError
from paxkv.fleet.prompt_digest import body_chain
from paxkv.ray.asgi_call import portable_scope
from paxkv.ray.relay import (
    Answer,
    AvoidedReplicas,
    RelayedAnswer,
    ReplicaLostError,
    error_answer,
)
from paxkv.ray.replica_metrics import merge_metrics
from paxkv.server.protocol.error_response import error_response
from paxkv.server.protocol.json_body import read_limited

_METRICS_PATH = "/metrics"
_METRICS_TIMEOUT_S = 5.0
# Load balancers wait only a short time for an answer.
_HEALTH_PATHS = ("/health", "/ping")
_HEALTH_TIMEOUT_S = 5.0


class Ingress:
    """Chooses a replica for each request by its prompt, and relays the replica's answer.

    It knows neither the model nor its tokenizer. Replicas check requests and their API keys.

    Args:
        engines: The deployment of `EngineReplica`.
        max_body_bytes: See `ServerConfig`.
        accept_timeout_s: See `RayConfig`.
    """

    def __init__(
        self, engines: DeploymentHandle, max_body_bytes: int, accept_timeout_s: float
    ) -> None:
        self._engines = engines
        self._answers = engines.options(method_name="answer", stream=True)
        self._max_body_bytes = max_body_bytes
        self._accept_timeout_s = accept_timeout_s
        self._avoid = AvoidedReplicas()

    async def __call__(self, request: Request) -> Response:
        if request.url.path == _METRICS_PATH:
            return await self._metrics(request)
        try:
            body = await read_limited(request, self._max_body_bytes)
        except PaxkvError as error:
            return error_answer(error, request.scope)
        is_probe = request.url.path in _HEALTH_PATHS
        return RelayedAnswer(
            functools.partial(self._answer, portable_scope(request.scope), body, body_chain(body)),
            accept_timeout_s=_HEALTH_TIMEOUT_S if is_probe else self._accept_timeout_s,
            avoid=self._avoid,
        )

    async def _answer(
        self, scope: dict[str, object], body: bytes, chain: list[int], avoid: Collection[str]
    ) -> Answer:
        answer = self._answers.remote(scope, body, chain=chain, avoid=list(avoid))
        try:
            async for item in answer:
                yield item
        except (RayError, RayServeException) as error:
            raise ReplicaLostError(f"{type(error).__name__}: {error}") from error
        finally:
            # Has no effect on a complete answer.
            answer.cancel()

    async def _metrics(self, request: Request) -> Response:
        try:
            results = await self._engines.broadcast("read_metrics").results_async(
                timeout_s=_METRICS_TIMEOUT_S, return_exceptions=True
            )
        except (TimeoutError, RayServeException):
            return error_response(EngineDeadError("no engine runs.", retry_after_s=1))
        pages = dict(page for page in results if not isinstance(page, BaseException))
        body, content_type = merge_metrics(pages, ",".join(request.headers.getlist("accept")))
        return Response(body, headers={"Content-Type": content_type})
