"""Routes about the server itself: models, health, load, metrics, version."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import paxkv
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import EngineDeadError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.metrics.metrics_format import choose_format
from paxkv.server.metrics.server_metrics import ServerMetrics
from paxkv.server.middleware.admission import Admission
from paxkv.server.protocol.openai_protocol import check_model
from paxkv.server.routes.json_response import json_response

# If the engine is too busy to answer, a scrape shows the latest counts that are known.
_STATS_TIMEOUT_S = 1.0


class FeatureState(msgspec.Struct, frozen=True, kw_only=True):
    active: bool
    detail: str


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "paxkv"
    root: str
    parent: None = None
    max_model_len: int
    features: dict[str, FeatureState]


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[ModelCard]


class InfoRoutes:
    """The routes about the server itself."""

    def __init__(self, engine: EngineClient, metrics: ServerMetrics, admission: Admission) -> None:
        self._engine = engine
        self._admission = admission
        self._metrics = metrics

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.list_models),
            # A model's name may contain slashes.
            Route("/v1/models/{model:path}", self.get_model),
            Route("/health", self.health),
            # Load balancers of some clouds use this path, with either method.
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load),
            Route("/metrics", self.metrics),
            Route("/version", self.version),
        ]

    async def list_models(self, _request: Request) -> Response:
        names = self._engine.model_info.model_names
        return json_response(ModelList(data=[self._model_card(name) for name in names]))

    async def get_model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if name not in self._engine.model_info.model_names:
            # Removes surplus slashes, unless a model's name ends with them.
            name = name.rstrip("/")
        check_model(name, self._engine.model_info)
        return json_response(self._model_card(name))

    async def health(self, _request: Request) -> Response:
        """Answers 200 while the engine can answer requests, otherwise 503 with the reason."""
        problem = self._engine.problem
        if problem is not None:
            raise problem
        return Response()

    async def load(self, _request: Request) -> Response:
        """The number of calls of clients that run or wait in the engine."""
        return json_response({"server_load": self._admission.num_calls})

    async def metrics(self, request: Request) -> Response:
        """The metrics, in Prometheus' text format or, if the client accepts it, OpenMetrics'."""
        stats = await self._stats()
        encode, content_type = choose_format(",".join(request.headers.getlist("accept")))
        body = self._metrics.render(stats, self._engine.token_totals, encode=encode)
        return Response(body, headers={"Content-Type": content_type})

    async def version(self, _request: Request) -> Response:
        return json_response({"version": paxkv.__version__})

    async def _stats(self) -> SchedulerStats:
        if not self._engine.is_alive:
            return self._engine.latest_stats
        try:
            return await asyncio.wait_for(self._engine.get_stats(), _STATS_TIMEOUT_S)
        except (TimeoutError, EngineDeadError):
            return self._engine.latest_stats

    def _model_card(self, name: str) -> ModelCard:
        info = self._engine.model_info
        return ModelCard(
            id=name,
            created=info.created,
            root=info.model,
            max_model_len=info.max_model_len,
            features={
                use.name: FeatureState(active=use.is_used, detail=use.detail)
                for use in info.feature_uses
            },
        )
