"""`paxkv run-batch` with an engine without a model, as a program for tests of signals."""

import asyncio
import sys

from paxkv.entrypoints.cli import run_batch
from paxkv.entrypoints.command_end import run_command
from tests.paxkv.server.fake_engine import FakeEngine


class BatchEngine(FakeEngine):
    """An engine that starts immediately and ends when it is closed."""

    async def start(self) -> None:
        self.end = asyncio.get_running_loop().create_future()

    async def wait_until_ended(self) -> str:
        return await self.end

    async def close(self, *, drain_timeout_s: float) -> None:
        await super().close(drain_timeout_s=drain_timeout_s)
        print("the engine was closed", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run_batch.build_async_client = lambda *_, **__: BatchEngine()
    sys.exit(run_command(run_batch.main))
