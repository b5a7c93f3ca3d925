"""Long work on the loop lets others run in between."""

import asyncio
import time

import msgspec
import pytest

from paxkv.server import loop_turn
from paxkv.server.loop_turn import LoopTurn
from paxkv.server.protocol.sse import EventStreamResponse


class Event(msgspec.Struct):
    number: int


async def turns_of_others(work) -> int:
    """How often another task runs before `work` has ended."""
    task = asyncio.ensure_future(work)
    num_turns = 0
    while not task.done():
        await asyncio.sleep(0)
        num_turns += 1
    await task
    return num_turns


@pytest.mark.parametrize(("max_turn_s", "num_turns"), [(-1.0, 11), (60.0, 1)])
def test_a_turn_ends_only_if_it_is_long(monkeypatch, max_turn_s, num_turns):
    monkeypatch.setattr(loop_turn, "_MAX_TURN_S", max_turn_s)

    async def work():
        turn = LoopTurn()
        for _ in range(10):
            await turn.end_if_long()

    assert asyncio.run(turns_of_others(work())) == num_turns


def test_a_stream_whose_events_are_there_already_lets_others_run():
    async def events():
        for number in range(20):
            time.sleep(0.003)
            yield Event(number)

    async def send(message):
        sent.append(message)

    async def work():
        response = await EventStreamResponse.start(events())
        await response({}, None, send)

    sent = []
    # 60 ms of work, 10 ms a turn.
    assert asyncio.run(turns_of_others(work())) >= 4
    assert len(sent) == 22


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_of_many_choices_lets_others_run_between_them(shared_server, monkeypatch, path):
    num_ended = []

    async def end_if_long(self):
        num_ended.append(self)

    monkeypatch.setattr(LoopTurn, "end_if_long", end_if_long)
    prompt = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else {"prompt": "a"}
    answer = shared_server.client.post(path, json=prompt | {"n": 5, "max_tokens": 8})
    assert len(answer.json()["choices"]) == 5
    assert len(num_ended) == 5
