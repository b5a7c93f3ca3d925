"""`EngineApp`: an engine and its application start together and leave no process behind."""

import asyncio

import pytest

from paxkv import asgi
from paxkv.asgi import EngineApp, EngineLoad
from paxkv.config.engine_config import EngineConfig
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.errors import EngineDeadError
from paxkv.server.batch.in_process_client import post_json
from tests.paxkv.server.fake_engine import FakeEngine


class ClosableEngine(FakeEngine):
    """Records its start and its end."""

    start_error: Exception | None = None
    latest_stats = SchedulerStats(num_running_reqs=3, num_waiting_reqs=2)

    def __init__(self) -> None:
        super().__init__()
        self.events: list[object] = []

    async def start(self) -> None:
        self.events.append("start")
        if self.start_error is not None:
            raise self.start_error

    async def close(self, *, drain_timeout_s: float) -> None:
        self.events.append(drain_timeout_s)


def test_application_answers_between_start_and_close(monkeypatch) -> None:
    engine = ClosableEngine()
    monkeypatch.setattr(asgi, "build_async_client", lambda *_: engine)

    async def run() -> None:
        served = await EngineApp.start(EngineConfig(), ServerConfig())
        assert served.load == EngineLoad(num_running=3, num_waiting=2)
        body = b'{"prompt": "hi", "max_tokens": 3}'
        response = await post_json(served.app, "/v1/completions", body, request_id="r")
        assert (response.status, engine.events) == (200, ["start"])
        await served.close(drain_timeout_s=1.5)
        assert engine.events == ["start", 1.5]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_engine_that_does_not_start_is_closed(monkeypatch) -> None:
    engine = ClosableEngine()
    engine.start_error = EngineDeadError("gone")
    monkeypatch.setattr(asgi, "build_async_client", lambda *_: engine)
    with pytest.raises(EngineDeadError, match="gone"):
        asyncio.run(EngineApp.start(EngineConfig(), ServerConfig()))
    assert engine.events == ["start", 0.0]


def test_engine_is_closed_if_its_start_is_cancelled(monkeypatch) -> None:
    engine = ClosableEngine()

    async def run() -> None:
        loop, may_end = asyncio.get_running_loop(), asyncio.Event()

        def build(*_: object) -> ClosableEngine:
            asyncio.run_coroutine_threadsafe(may_end.wait(), loop).result(60)
            return engine

        monkeypatch.setattr(asgi, "build_async_client", build)
        starting = asyncio.ensure_future(EngineApp.start(EngineConfig(), ServerConfig()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        starting.cancel()
        await asyncio.sleep(0)
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(asyncio.wait_for(run(), 60))
    assert engine.events == [0.0]
