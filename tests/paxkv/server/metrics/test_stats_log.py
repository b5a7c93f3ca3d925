"""A line an interval with something in it, of what was done in that interval."""

import asyncio
import contextlib
import logging

import pytest

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.request_output import TokenTotals
from paxkv.server.metrics.stats_log import StatsLog
from tests.paxkv.server.conftest import ShiftedLoop


class Engine:
    latest_stats = SchedulerStats()
    token_totals = TokenTotals()

    def has_counted(self, prompt: int, cached: int, generated: int, **stats: float) -> None:
        self.token_totals = TokenTotals(
            num_prompt_tokens=prompt,
            num_cached_prompt_tokens=cached,
            num_generation_tokens=generated,
        )
        self.latest_stats = SchedulerStats(**stats)


@pytest.fixture(autouse=True)
def shows_info(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="paxkv.server.metrics.stats_log")


def test_rates_are_of_the_interval_and_cached_prompts_are_not_computed(caplog) -> None:
    engine = Engine()
    engine.has_counted(1000, 0, 5000, num_steps=40)
    log = StatsLog(engine, 10.0)
    engine.has_counted(
        1300,
        100,
        5040,
        num_steps=42,
        num_running_reqs=8,
        num_waiting_reqs=2,
        kv_cache_usage=0.125,
        prefix_cache_recent_queries=300,
        prefix_cache_recent_hits=100,
    )
    log.log(5.0)
    assert caplog.messages == [
        "prompts 40.0 tokens/s, generation 8.0 tokens/s, running 8, waiting 2, KV cache 12.5 %, "
        "prefix cache hits 33.3 %"
    ]


def test_the_log_line_has_drafts_if_the_interval_had_some(caplog) -> None:
    engine = Engine()
    engine.has_counted(1, 0, 1, num_steps=1, num_draft_tokens=100, num_accepted_tokens=100)
    log = StatsLog(engine, 10.0)
    engine.has_counted(1, 0, 9, num_steps=2, num_draft_tokens=140, num_accepted_tokens=110)
    log.log(10.0)
    assert caplog.messages[-1].endswith(
        "prefix cache hits 0.0 %, drafts 4.0 tokens/s, accepted 25.0 %"
    )
    engine.has_counted(1, 0, 19, num_steps=3, num_draft_tokens=140, num_accepted_tokens=110)
    log.log(10.0)
    # Of an engine that was started anew.
    engine.has_counted(1, 0, 29, num_steps=4, num_draft_tokens=9, num_accepted_tokens=2)
    log.log(10.0)
    assert [message.count("drafts") for message in caplog.messages] == [1, 0, 0]


def test_an_idle_interval_has_no_line_and_one_that_waits_has(caplog) -> None:
    engine = Engine()
    engine.has_counted(10, 0, 20, num_steps=4)
    log = StatsLog(engine, 10.0)
    log.log(10.0)
    assert caplog.messages == []
    # Nothing comes of a request that hangs, which is what to know.
    engine.has_counted(10, 0, 20, num_steps=4, num_waiting_reqs=1)
    log.log(10.0)
    assert len(caplog.messages) == 1 and "generation 0.0 tokens/s" in caplog.messages[0]
    # All of another engine, that has come and gone idle since.
    engine.has_counted(10, 0, 30, num_steps=1)
    log.log(10.0)
    log.log(10.0)
    assert len(caplog.messages) == 2 and "generation 1.0 tokens/s" in caplog.messages[1]
    # A third engine without requests.
    engine.has_counted(10, 0, 30, num_steps=0)
    log.log(10.0)
    assert len(caplog.messages) == 2
    # A fourth one that has not begun yet, behind one that had done something.
    engine.has_counted(10, 0, 50, num_steps=0)
    log.log(10.0)
    log.log(10.0)
    assert len(caplog.messages) == 3 and "generation 2.0 tokens/s" in caplog.messages[2]


def test_every_interval_ends_at_its_time_and_a_late_one_is_longer(caplog) -> None:
    engine = Engine()
    loop = ShiftedLoop()

    async def pass_time(seconds: float) -> None:
        loop.move_clock(seconds)
        for _ in range(3):
            await asyncio.sleep(0)

    async def run() -> None:
        task = asyncio.ensure_future(StatsLog(engine, 3600.0).run())
        await pass_time(0.0)
        engine.has_counted(0, 0, 36_000, num_steps=1)
        await pass_time(3599.0)
        assert caplog.messages == []
        await pass_time(1.0)
        engine.has_counted(0, 0, 108_000, num_steps=2)
        await pass_time(7200.0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(run())
    rates = [line.split("generation ")[1].split()[0] for line in caplog.messages]
    assert rates == ["10.0", "10.0"]
