"""One poll serves all pages; a slow page gets a snapshot instead of a backlog."""

import asyncio
import json

import pytest

from paxkv.errors import EngineDeadError
from paxkv.inspector import feed as feed_module
from paxkv.inspector.feed import MAX_BACKLOG, MAX_PAGES, InspectorFeed, TooManyPagesError


class CountingEngine:
    """An engine whose frames are numbers."""

    def __init__(self):
        self.seq = 100
        self.questions = []
        self.is_dead = False

    async def inspect(self, after_seq, wants_snapshot, *, keeps_tokens=False):
        if self.is_dead:
            raise EngineDeadError("the engine has ended: pulled the plug")
        self.questions.append((after_seq, wants_snapshot))
        is_next, self.seq = after_seq == self.seq, self.seq + 1
        return json.dumps(
            {
                "seq": self.seq,
                "took_s": 0.0,
                "snapshot": {"n": self.seq} if wants_snapshot or not is_next else None,
                "delta": {"n": self.seq} if is_next else None,
            }
        )


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(feed_module, "PERIOD_S", 0.001)
    monkeypatch.setattr(feed_module, "SNAPSHOT_PERIOD_S", 0.0)
    monkeypatch.setattr(feed_module, "RETRY_S", 0.001)


def read(event):
    name, data = event.decode().removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def take(events, count):
    return [read(await asyncio.wait_for(anext(events), 60)) for _ in range(count)]


def test_pages_share_polls_and_each_starts_with_a_snapshot():
    async def scenario():
        engine = CountingEngine()
        feed = InspectorFeed(engine)
        first = feed.events()
        got = await take(first, 3)
        assert [name for name, _ in got] == ["snapshot", "delta", "delta"]
        second = feed.events()
        (name, frame), *_ = await take(second, 1)
        assert name == "snapshot"
        # The first page continues with all deltas.
        more = await take(first, frame["n"] - got[-1][1]["n"])
        assert {name for name, _ in more} == {"delta"}
        assert [f["n"] for _, f in more] == list(range(got[-1][1]["n"] + 1, frame["n"] + 1))
        assert feed.num_pages == 2
        await first.aclose()
        await second.aclose()
        # Without pages, the engine is not polled.
        num_questions = len(engine.questions)
        await asyncio.sleep(0.02)
        assert len(engine.questions) == num_questions and feed.num_pages == 0

    asyncio.run(scenario())


def test_slow_page_skips_frames_and_continues_with_a_snapshot():
    async def scenario():
        engine = CountingEngine()
        events = InspectorFeed(engine).events()
        await take(events, 1)
        start = len(engine.questions)
        while len(engine.questions) < start + 3 * MAX_BACKLOG:
            await asyncio.sleep(0.005)
        names = [name for name, _ in await take(events, MAX_BACKLOG)]
        assert "snapshot" in names and names.index("snapshot") < MAX_BACKLOG
        await events.aclose()

    asyncio.run(scenario())


def test_missed_frame_is_replaced_by_a_snapshot():
    async def scenario():
        engine = CountingEngine()
        events = InspectorFeed(engine).events()
        await take(events, 2)
        engine.seq += 7
        names = [name for name, _ in await take(events, 40)]
        assert names.count("snapshot") == 1
        await events.aclose()

    asyncio.run(scenario())


def test_expensive_answers_are_polled_less_often(monkeypatch):
    async def scenario():
        engine, pauses = CountingEngine(), []
        real_sleep = asyncio.sleep

        async def sleep(pause_s):
            pauses.append(pause_s)
            await real_sleep(0.001)

        async def inspect(after_seq, wants_snapshot, *, keeps_tokens):
            reply = json.loads(await CountingEngine.inspect(engine, after_seq, wants_snapshot))
            return json.dumps(reply | {"took_s": 0.002})

        engine.inspect = inspect
        monkeypatch.setattr(feed_module.asyncio, "sleep", sleep)
        events = InspectorFeed(engine).events()
        await take(events, 3)
        await events.aclose()
        # 0.002 s are 0.25 % of 0.8 s; the first answer is a snapshot.
        assert pauses[0] < 0.1 and 0.4 < min(pauses[1:]) <= max(pauses) <= 0.8

    asyncio.run(scenario())


def test_death_is_reported_and_a_new_engine_starts_with_a_snapshot():
    async def scenario():
        engine = CountingEngine()
        events = InspectorFeed(engine).events()
        await take(events, 1)
        engine.is_dead = True
        got = await take(events, 1)
        while got[-1][0] == "delta":
            got = await take(events, 1)
        assert got[-1] == ("trouble", {"message": "the engine has ended: pulled the plug"})
        engine.is_dead = False
        while got[-1][0] == "trouble":
            got = await take(events, 1)
        assert got[-1][0] == "snapshot"
        await events.aclose()

    asyncio.run(scenario())


def test_close_ends_every_stream_and_too_many_pages_are_rejected():
    async def scenario():
        feed = InspectorFeed(CountingEngine())
        pages = [feed.events() for _ in range(MAX_PAGES)]
        for events in pages:
            await take(events, 1)
        with pytest.raises(TooManyPagesError):
            await anext(feed.events())
        feed.close()
        for events in pages:
            names = [read(event)[0] async for event in events]
            assert names[-1] == "closed"
        assert feed.num_pages == 0
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(feed.events())

    asyncio.run(scenario())
