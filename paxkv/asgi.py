"""`EngineApp`: engine processes and the ASGI application that serves them, for any ASGI server."""

import asyncio
import dataclasses
from typing import Self

from starlette.applications import Starlette

from paxkv.client.async_client import AsyncEngineClient
from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.entrypoints.build_client import build_async_client
from paxkv.package_origin import check_package_origin
from paxkv.server.app import create_app
from paxkv.server.metrics.stats_log import StatsLog


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The requests that an engine has not finished, by its last report."""

    num_running: int
    num_waiting: int


class EngineApp:
    """An engine that has started, and the application that serves it.

        served = await EngineApp.start(EngineConfig(), ServerConfig())
        ...  # serve served.app on the same loop
        await served.close(drain_timeout_s=30.0)

    Settings of sockets, such as `ServerConfig.port`, have no effect: the ASGI server has its own.

    Attributes:
        app: The ASGI application. It handles no lifespan messages.
        engine: The engine's client.
    """

    def __init__(
        self, engine: AsyncEngineClient, app: Starlette, stats_log: StatsLog | None
    ) -> None:
        self.engine = engine
        self.app = app
        self._stats_log = None if stats_log is None else asyncio.create_task(stats_log.run())

    @classmethod
    async def start(cls, engine_config: EngineConfig, server_config: ServerConfig) -> Self:
        """Starts the engine processes, and returns when they accept requests.

        Raises:
            ConfigError: The settings do not fit the model or the machine, or the model cannot be
                loaded.
            EngineDeadError: An engine ended before it was ready.
        """
        # The engine process would fail without a reason.
        check_package_origin()
        building = asyncio.ensure_future(
            asyncio.to_thread(build_async_client, engine_config, server_config)
        )
        try:
            engine = await asyncio.shield(building)
        except asyncio.CancelledError:
            # The thread cannot be interrupted, and its engine processes must not stay.
            await (await building).close(drain_timeout_s=0.0)
            raise
        return await cls.start_built(engine, server_config, engine_config)

    @classmethod
    async def start_built(
        cls,
        engine: AsyncEngineClient,
        server_config: ServerConfig,
        engine_config: EngineConfig | None,
    ) -> Self:
        """Like `start`, with engine processes that have started. Closes them if it fails.

        Args:
            engine_config: See `create_app`.
        """
        try:
            await engine.start()
            app = create_app(engine, server_config, engine_config)
            stats_log = None
            if not server_config.disable_log_stats:
                stats_log = StatsLog(engine, server_config.log_stats_interval_s)
            return cls(engine, app, stats_log)
        except BaseException:
            await engine.close(drain_timeout_s=0.0)
            raise

    @property
    def load(self) -> EngineLoad:
        """How busy the engine is."""
        stats = self.engine.latest_stats
        return EngineLoad(num_running=stats.num_running_reqs, num_waiting=stats.num_waiting_reqs)

    async def close(self, *, drain_timeout_s: float = 0.0) -> None:
        """Ends the engine processes. May be repeated.

        Args:
            drain_timeout_s: Time in which requests may finish. The others end with errors, which
                the application sends to their clients.
        """
        # The inspector's streams never end, and no client waits for background responses.
        for end in self.app.state.on_drain:
            end()
        if self._stats_log is not None:
            self._stats_log.cancel()
            await asyncio.gather(self._stats_log, return_exceptions=True)
        await self.engine.close(drain_timeout_s=drain_timeout_s)
