"""What a client receives if replicas fail before, during and after an answer."""

import asyncio
import json
from collections.abc import AsyncGenerator, Collection

import pytest

from paxkv.config.server_config import ServerConfig
from paxkv.errors import EngineDeadError
from paxkv.ray.asgi_call import call_app, portable_scope
from paxkv.ray.relay import Accepted, AvoidedReplicas, RelayedAnswer, ReplicaLostError
from paxkv.server.app import create_app
from tests.paxkv.server.fake_engine import DIE_AFTER_3, FakeEngine


def start(status: int = 200, kind: bytes = b"text/event-stream") -> dict:
    headers = [(b"Content-Type", kind)]
    return {"type": "http.response.start", "status": status, "headers": headers}


def part(body: bytes, *, is_last: bool = False) -> dict:
    return {"type": "http.response.body", "body": body, "more_body": not is_last}


LOST = ReplicaLostError("killed")
WHOLE = [[start()], [part(b"data: 1\n\n"), part(b"data: [DONE]\n\n", is_last=True)]]
FULL = [[start(503), part(b"full", is_last=True)]]


class Replicas:
    """Replicas "0", "1" and so on: each attempt goes to the next, which answers as given."""

    def __init__(self, *answers: list[object]) -> None:
        self.answers = answers
        self.avoided: list[list[str]] = []
        self.num_closed = 0

    async def answer(self, avoid: Collection[str]) -> AsyncGenerator[object, None]:
        number = len(self.avoided)
        self.avoided.append(list(avoid))
        try:
            for item in [Accepted(str(number)), *self.answers[number]]:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.num_closed += 1

    def relay(self, path: str = "/v1/completions", *, accept_timeout_s: float = 60.0) -> list[dict]:
        """The messages that the client gets."""
        return asyncio.run(self._relay(path, accept_timeout_s))

    async def _relay(self, path: str, accept_timeout_s: float) -> list[dict]:
        sent = []

        async def send(message: dict) -> None:
            sent.append(message)

        answer = RelayedAnswer(
            self.answer, accept_timeout_s=accept_timeout_s, avoid=AvoidedReplicas()
        )
        scope = {"type": "http", "path": path, "headers": [], "method": "POST"}
        await asyncio.wait_for(answer(scope, None, send), 30)
        assert self.num_closed == len(self.avoided)
        return sent


@pytest.mark.parametrize("failure", [[LOST], [[start()], LOST], [[start()]], FULL, []])
def test_request_that_has_not_begun_goes_to_another_replica(failure: list[object]) -> None:
    replicas = Replicas(failure, WHOLE)
    sent = replicas.relay()
    assert [message.get("body", b"") for message in sent] == [
        *(b"", b"data: 1\n\n", b"data: [DONE]\n\n")
    ]
    assert replicas.avoided == [[], ["0"]]


@pytest.mark.parametrize(
    ("path", "beginning"),
    [
        ("/v1/completions", 'data: {"error":'),
        ("/v1/chat/completions", 'data: {"error":'),
        ("/v1/responses", 'event: error\ndata: {"error":'),
        ("/v1/messages", 'event: error\ndata: {"type":"error","error":{"type":"api_error",'),
    ],
)
@pytest.mark.parametrize("end", [[LOST], []])
def test_stream_that_has_begun_ends_with_an_error_of_its_api(
    path: str, beginning: str, end: list[object]
) -> None:
    replicas = Replicas([[start()], [part(b"data: 1\n\n")], *end])
    sent = replicas.relay(path)
    assert sent[1] == part(b"data: 1\n\n")
    assert len(sent) == 3 and not sent[2]["more_body"]
    event = sent[2]["body"].decode()
    assert event.startswith(beginning) and event.endswith("}\n\n")
    assert "the engine has ended" in json.loads(event.partition("data: ")[2])["error"]["message"]


@pytest.mark.parametrize("kind", [b"text/event-stream", b"application/json"])
def test_a_replica_that_is_lost_after_its_answer_changes_nothing(kind: bytes) -> None:
    answer = [start(kind=kind), part(b"{}", is_last=True)]
    replicas = Replicas([answer, LOST])
    assert replicas.relay() == answer
    assert len(replicas.avoided) == 1


def test_body_that_has_begun_and_is_no_stream_is_cut() -> None:
    replicas = Replicas([[start(kind=b"application/json"), part(b'{"half":')], LOST])
    with pytest.raises(EngineDeadError):
        replicas.relay()


def test_a_refusal_is_forwarded_after_three_attempts() -> None:
    replicas = Replicas(FULL, FULL, FULL, WHOLE)
    sent = replicas.relay()
    assert (sent[0]["status"], sent[1]["body"]) == (503, b"full")
    assert replicas.avoided == [[], ["0"], ["0", "1"]]


def test_a_refusal_is_forwarded_if_the_last_replica_is_lost() -> None:
    sent = Replicas(FULL, [LOST], [LOST]).relay()
    assert (sent[0]["status"], sent[1]["body"]) == (503, b"full")


def test_three_lost_replicas_are_an_error_with_a_time_to_retry() -> None:
    sent = Replicas([LOST], [LOST], [LOST], WHOLE).relay()
    assert sent[0]["status"] == 503
    assert (b"retry-after", b"1") in sent[0]["headers"]
    assert json.loads(sent[1]["body"])["error"]["code"] == "engine_dead"


def test_an_error_of_the_ingress_has_the_form_of_its_api() -> None:
    sent = Replicas([LOST], [LOST], [LOST]).relay("/v1/messages")
    assert (sent[0]["status"], json.loads(sent[1]["body"])["type"]) == (503, "error")
    assert (b"retry-after", b"1") in sent[0]["headers"]


def test_an_error_of_the_client_is_not_retried() -> None:
    replicas = Replicas([[start(400), part(b"wrong", is_last=True)]], WHOLE)
    assert replicas.relay()[1]["body"] == b"wrong"


def test_a_request_that_no_replica_accepts_ends() -> None:
    calls = []

    async def accept_never(avoid: Collection[str]) -> AsyncGenerator[object, None]:
        calls.append(avoid)
        await asyncio.Event().wait()
        yield

    replicas = Replicas()
    replicas.answer = accept_never
    sent = replicas.relay(accept_timeout_s=0.01)
    assert (sent[0]["status"], len(calls)) == (503, 1)
    assert "no engine accepted" in json.loads(sent[1]["body"])["error"]["message"]


def test_a_failed_replica_is_avoided_only_for_a_while() -> None:
    async def run() -> None:
        avoid = AvoidedReplicas(period_s=0.05)
        avoid.add("a")
        assert avoid.ids() == ["a"]
        await asyncio.sleep(0.1)
        assert avoid.ids() == []

    asyncio.run(run())


def test_application_is_called_across_processes_as_it_is_called_directly() -> None:
    app = create_app(FakeEngine(), ServerConfig())
    body = json.dumps({"prompt": DIE_AFTER_3, "stream": True, "max_tokens": 9}).encode()
    scope = {
        **{"type": "http", "method": "POST", "path": "/v1/completions", "root_path": ""},
        **{"query_string": b"", "headers": [(b"content-type", b"application/json")]},
        **{"raw_path": b"/v1/completions", "extensions": object(), "app": object()},
    }

    async def run() -> list[dict]:
        answer = call_app(app, portable_scope(scope), body)
        return [message async for messages in answer for message in messages]

    first, *rest = asyncio.run(run())
    assert first["status"] == 200
    assert rest[-1]["body"].startswith(b'data: {"error":') and not rest[-1]["more_body"]


def test_closing_the_call_cancels_the_request() -> None:
    ended = []

    async def app(scope: dict, receive: object, send: object) -> None:
        try:
            await send(start())
            await asyncio.Event().wait()
        finally:
            ended.append(scope["path"])

    async def run() -> None:
        answer = call_app(app, {"path": "/x"}, b"")
        assert await anext(answer) == [start()]
        await answer.aclose()
        assert ended == ["/x"]

    asyncio.run(run())
