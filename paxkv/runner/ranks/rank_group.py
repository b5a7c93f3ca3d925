"""`Leader` and `Follower`: the two ends of the channel between the processes of one engine."""

import collections
import time
from collections.abc import Callable
from typing import Protocol

import zmq

from paxkv.contracts.rank_place import RankPlace
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.runner.ranks.rank_message import (
    Body,
    Call,
    End,
    Join,
    RankMessageError,
    Value,
    Values,
    decode,
    encode,
)

_LINGER_MS = 1000


class RankGroup(Protocol):
    """What the processes of an engine need to agree while they start."""

    place: RankPlace

    def exchange(self, name: str, value: str | int) -> tuple[str | int, ...]:
        """Returns the values of all ranks, in their order. All ranks must call it.

        Raises:
            EngineDeadError: A rank did not answer in time, or exchanges another name.
        """
        ...

    def end(self) -> None:
        """Closes the channel. The leader also ends the followers. May be repeated."""
        ...


def agree(group: RankGroup | None, name: str, value: Callable[[], str]) -> None:
    """Checks that all ranks have the same value. Without a group, there is nothing to check.

    Raises:
        ConfigError: They differ.
    """
    if group is None:
        return
    first, *others = group.exchange(name, value())
    for rank, other in enumerate(others, start=1):
        if other != first:
            lines = zip(first.splitlines(), other.splitlines(), strict=False)
            line, other_line = next((pair for pair in lines if len(set(pair)) > 1), (first, other))
            raise ConfigError(
                f"the hosts of an engine must have the same {name}. Host 0 has {line!r}, host "
                f"{rank} has {other_line!r}. Use equal machines, flags and versions."
            )


class Leader:
    """Rank 0: sends every call to all followers.

    Raises:
        EngineDeadError: A follower did not join within `place.timeout_s`.
    """

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)  # an unlimited queue, because a lost call would end the engine
        self._socket.router_mandatory = True
        self._socket.bind(place.calls_endpoint)
        self._names = [b"rank-%d" % rank for rank in range(1, place.num_ranks)]
        # Messages that were received early, because a follower may be ahead of another one.
        self._waiting: dict[bytes, collections.deque[Body]] = {
            name: collections.deque() for name in self._names
        }
        self._num_received = dict.fromkeys(self._names, 0)
        self._num_sent = 0
        try:
            self._receive_from_all(Join)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def exchange(self, name: str, value: str | int) -> tuple[str | int, ...]:
        """See `RankGroup.exchange`."""
        found = self._receive_from_all(Value)
        for rank, theirs in enumerate(found, start=1):
            if theirs.name != name:
                raise EngineDeadError(
                    f"host {rank} decides {theirs.name!r} while the leader decides {name!r}. "
                    "Install the same paxkv on all hosts."
                )
        values = (value, *(theirs.value for theirs in found))
        self._send(Values(name, values))
        return values

    def send(self, call: Call) -> None:
        """Queues a call for all followers. Never waits.

        Raises:
            EngineDeadError: A follower has ended.
        """
        self._send(call)

    def end(self) -> None:
        """Ends the followers. May be repeated."""
        if self._context.closed:
            return
        try:
            self._send(End())
        except EngineDeadError:
            return
        finally:
            self._context.destroy(linger=_LINGER_MS)

    def _send(self, body: Body) -> None:
        message = encode(self._num_sent, body)
        self._num_sent += 1
        for rank, name in enumerate(self._names, start=1):
            try:
                self._socket.send_multipart([name, message], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                raise EngineDeadError(f"host {rank} cannot be reached: {error}.") from error

    def _receive_from_all(self, kind: type[Body]) -> list[Body]:
        """Returns one message of each follower, in the order of ranks."""
        end_s = time.monotonic() + self.place.timeout_s
        while missing := [
            rank for rank, name in enumerate(self._names, 1) if not self._waiting[name]
        ]:
            if not self._socket.poll(max(0, 1000 * (end_s - time.monotonic()))):
                raise EngineDeadError(
                    f"hosts {missing} sent no {kind.__name__} within {self.place.timeout_s:g} "
                    "seconds, the limit that --distributed-timeout-seconds sets."
                )
            name, message = self._socket.recv_multipart()
            if name not in self._waiting:
                raise RankMessageError(f"{name!r} is no process of this engine.")
            body = decode(message, number=self._num_received[name], sender=name.decode())
            self._num_received[name] += 1
            self._waiting[name].append(body)
        return [
            _checked(self._waiting[name].popleft(), kind, name.decode()) for name in self._names
        ]


class Follower:
    """Every other rank: receives the leader's calls."""

    def __init__(self, place: RankPlace) -> None:
        self.place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.identity = b"rank-%d" % place.rank
        self._socket.connect(place.calls_endpoint)
        self._num_received = self._num_sent = 0
        self._send(Join(place.rank))

    def exchange(self, name: str, value: str | int) -> tuple[str | int, ...]:
        """See `RankGroup.exchange`."""
        self._send(Value(name, value))
        if not self._socket.poll(1000 * self.place.timeout_s):
            raise EngineDeadError(
                f"the leader did not decide {name!r} within {self.place.timeout_s:g} seconds, the "
                "limit that --distributed-timeout-seconds sets."
            )
        return _checked(self._receive(), Values, "the leader").values

    def next_call(self) -> Call | None:
        """Waits for the leader's next call; None if the leader has ended.

        An idle leader sends nothing, so this wait has no limit of its own. The process that
        started this one ends it if the connection to the leader's host is lost.
        """
        body = self._receive()
        return None if isinstance(body, End) else _checked(body, Call, "the leader")

    def end(self) -> None:
        self._context.destroy(linger=_LINGER_MS)

    def _receive(self) -> Body:
        message = self._socket.recv()
        body = decode(message, number=self._num_received, sender="the leader")
        self._num_received += 1
        return body

    def _send(self, body: Body) -> None:
        self._socket.send(encode(self._num_sent, body))
        self._num_sent += 1


def _checked(body: Body, kind: type[Body], sender: str) -> Body:
    if not isinstance(body, kind):
        raise RankMessageError(
            f"expected a {kind.__name__} from {sender}, got a {type(body).__name__}."
        )
    return body
