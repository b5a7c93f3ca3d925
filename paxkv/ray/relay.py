"""`RelayedAnswer`: sends a replica's answer to the client, or another's if the replica fails."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Collection
from contextlib import aclosing
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from paxkv.errors import EngineDeadError, PaxkvError
from paxkv.server.protocol.anthropic.errors import anthropic_error
from paxkv.server.protocol.error_response import describe_error, error_response
from paxkv.server.protocol.request_names import request_id_of
from paxkv.server.routes.messages import MESSAGES_PATH
from paxkv.server.routes.route_path import is_below

logger = logging.getLogger(__name__)

# A prompt that kills engines must not kill all of them.
_MAX_ATTEMPTS = 3
_RETRY_AFTER_S = 1
_RESPONSES_PATH = "/v1/responses"
_UNAVAILABLE = 503


class ReplicaLostError(PaxkvError):
    """The replica that had the request has ended or cannot be reached."""


@dataclasses.dataclass(frozen=True, slots=True)
class Accepted:
    """The first item of a replica's answer: the id of the replica that accepted the request."""

    replica_id: str


# `Accepted`, then lists of ASGI messages.
Answer = AsyncGenerator[Accepted | list[Message], None]


class AnswerRequest(Protocol):
    """Sends the request to a replica that is not in `avoid`, if there is one."""

    def __call__(self, avoid: Collection[str]) -> Answer:
        """The replica's answer; raises `ReplicaLostError` if the replica fails."""
        ...


class RelayedAnswer(Response):
    """The answer of the first replica that does not fail.

    While nothing has been sent to the client, a request whose replica was lost, or answered 503, is
    sent to another replica. If the replica of a stream that has begun is lost, the stream ends with
    an error event in the form of its API.

    Args:
        answer: Sends the request.
        accept_timeout_s: Time in which a replica must accept the request. If none does, the client
            gets status 503.
        avoid: Replicas that failed other requests recently. Replicas that fail this one are added.
    """

    def __init__(
        self, answer: AnswerRequest, *, accept_timeout_s: float, avoid: "AvoidedReplicas"
    ) -> None:
        super().__init__()
        self._answer = answer
        self._accept_timeout_s = accept_timeout_s
        self._avoid = avoid

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        last_answer: list[Message] = []
        for attempt in range(1, _MAX_ATTEMPTS + 1):
            relay = _Relay(scope, send, may_retry=attempt < _MAX_ATTEMPTS)
            try:
                last_answer = await self._relay(relay)
            except EngineDeadError as error:
                await error_answer(error, scope)(scope, receive, send)
                return
            except ReplicaLostError as error:
                if relay.replica_id is not None:
                    self._avoid.add(relay.replica_id)
                logger.warning("attempt %d: %s", attempt, error)
                if relay.is_complete:
                    return
                if relay.has_begun:
                    await relay.end_with(_lost())
                    return
            if relay.has_begun:
                return
        for message in last_answer:
            await send(message)
        if not last_answer:
            await error_answer(_lost(), scope)(scope, receive, send)

    async def _relay(self, relay: "_Relay") -> list[Message]:
        """Sends one replica's answer; or returns it unsent, if another replica may be tried."""
        withheld: list[Message] = []
        async with aclosing(self._answer(self._avoid.ids())) as answer:
            try:
                async with asyncio.timeout(self._accept_timeout_s):
                    accepted = await anext(answer)
            except TimeoutError:
                raise EngineDeadError(
                    f"no engine accepted the request within {self._accept_timeout_s:g} s. All "
                    "are starting or full: try again later.",
                    retry_after_s=_RETRY_AFTER_S,
                ) from None
            assert isinstance(accepted, Accepted)
            relay.replica_id = accepted.replica_id
            async for messages in answer:
                for message in messages:
                    if withheld or relay.may_withhold(message):
                        withheld.append(message)
                    else:
                        await relay.forward(message)
        if withheld:
            self._avoid.add(accepted.replica_id)
        elif not relay.is_complete:
            raise ReplicaLostError(
                f"replica {accepted.replica_id} ended in the middle of an answer."
            )
        return withheld


class _Relay:
    """One attempt to answer a client."""

    def __init__(self, scope: Scope, send: Send, *, may_retry: bool) -> None:
        self._scope = scope
        self._send = send
        self._may_retry = may_retry
        # The first message of the answer. It is sent together with the first part of the body, so
        # that the request can be retried if the replica is lost between the two.
        self._start: Message | None = None
        self.replica_id: str | None = None
        self.has_begun = False
        self.is_complete = False
        self._is_stream = False

    def may_withhold(self, message: Message) -> bool:
        """Whether the message begins an answer with status 503 and another replica may be tried."""
        is_start = message["type"] == "http.response.start"
        return self._may_retry and is_start and message["status"] == _UNAVAILABLE

    async def forward(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if self._start is not None:
            start, self._start = self._start, None
            self.has_begun = True
            headers = {name.lower(): value for name, value in start["headers"]}
            kind = headers.get(b"content-type", b"")
            self._is_stream = kind.startswith(b"text/event-stream")
            await self._send(start)
        self.is_complete = not message.get("more_body", False)
        await self._send(message)

    async def end_with(self, error: PaxkvError) -> None:
        """Ends an answer that has begun.

        Raises:
            PaxkvError: The answer is no stream of events, so only the connection can be cut.
        """
        if not self._is_stream:
            raise error
        body = stream_error(error, self._scope["path"], request_id_of(self._scope))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})


class AvoidedReplicas:
    """The replicas that failed within the last seconds.

    A replica whose engine restarts answers 503 at once. It has the fewest requests, so the router
    would choose it again.
    """

    def __init__(self, period_s: float = 2.0) -> None:
        self._period_s = period_s
        self._until_s: dict[str, float] = {}

    def add(self, replica_id: str) -> None:
        self._until_s[replica_id] = asyncio.get_running_loop().time() + self._period_s

    def ids(self) -> list[str]:
        now_s = asyncio.get_running_loop().time()
        self._until_s = {key: until for key, until in self._until_s.items() if until > now_s}
        return list(self._until_s)


def error_answer(error: PaxkvError, scope: Scope) -> Response:
    """The answer for an error of the ingress, in the form of the path's API."""
    response = error_response(error)
    if not is_below(scope["path"], MESSAGES_PATH):
        return response
    found = anthropic_error(
        response.status_code, bytes(response.body), request_id=request_id_of(scope)
    )
    assert found is not None
    status, body = found
    headers = {name: value for name, value in response.headers.items() if name == "retry-after"}
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def stream_error(error: PaxkvError, path: str, request_id: str) -> bytes:
    """The event that ends a stream with an error, in the form of the path's API."""
    status, body = describe_error(error)
    name = b""
    if is_below(path, MESSAGES_PATH):
        name = b"event: error\n"
        found = anthropic_error(status, body, request_id=request_id)
        assert found is not None
        body = msgspec.json.encode(found[1])
    elif is_below(path, _RESPONSES_PATH):
        name = b"event: error\n"
    return name + b"data: " + body + b"\n\n"


def _lost() -> EngineDeadError:
    return EngineDeadError(
        "the engine has ended. Another is being started: try again later.",
        retry_after_s=_RETRY_AFTER_S,
    )
