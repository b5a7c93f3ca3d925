"""`EngineReplica`: one engine with its application, as a replica of Ray Serve."""

from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from starlette.types import Message

from paxkv.asgi import EngineApp
from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.process_logging import set_up_logging
from paxkv.errors import EngineDeadError
from paxkv.ray.asgi_call import call_app
from paxkv.ray.relay import Accepted
from paxkv.ray.replica_load import NEEDED_REPLICAS, needed_replicas
from paxkv.ray.request_router import CACHE_TOKENS
from paxkv.server.batch.in_process_client import get_text


class EngineReplica:
    """Starts an engine, answers requests with it, and closes it. Ray Serve calls all methods."""

    _served: EngineApp | None = None

    async def __init__(self, engine_config: EngineConfig, server_config: ServerConfig) -> None:
        set_up_logging()
        self._id = serve.get_replica_context().replica_id.unique_id
        self._drain_timeout_s = server_config.shutdown_timeout_s
        self._served = await EngineApp.start(engine_config, server_config)

    async def answer(
        self, scope: dict[str, Any], body: bytes, *, chain: list[int], avoid: list[str]
    ) -> AsyncGenerator[Accepted | list[Message], None]:
        """Runs one request.

        Args:
            scope: Result of `portable_scope`.
            chain: Only `PrefixRequestRouter` reads it, and `avoid`.
        """
        del chain, avoid
        yield Accepted(self._id)
        answer = call_app(self._served.app, scope, body)
        try:
            async for messages in answer:
                yield messages
        finally:
            await answer.aclose()

    async def read_metrics(self) -> tuple[str, str]:
        """The replica's id, and its metrics in Prometheus' text format."""
        return self._id, await get_text(self._served.app, "/metrics")

    def record_replica_metadata(self) -> dict[str, int]:
        """Returns the size of the prefix cache. Ray Serve reads it once, for the routers."""
        return {CACHE_TOKENS: self._served.engine.model_info.max_fitting_tokens}

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the replicas that the requests need. The autoscaler reads it regularly."""
        engine = self._served.engine
        needed = needed_replicas(engine.latest_stats, engine.model_info.max_num_seqs)
        return {NEEDED_REPLICAS: needed}

    async def check_health(self) -> None:
        """Raises an error if the replica must be replaced.

        A replica that restarts its engine need not be replaced: other replicas get the requests
        meanwhile.
        """
        problem = self._served.engine.problem
        if isinstance(problem, EngineDeadError) and problem.retry_after_s is not None:
            return
        if problem is not None:
            raise problem

    async def __del__(self) -> None:
        # Ray Serve waits for the requests before this. After a failed start there is no engine.
        if self._served is not None:
            await self._served.close(drain_timeout_s=self._drain_timeout_s)
