"""Messages between the hosts of an engine: one line of JSON each, over TCP.

Host 0 listens at `ParallelConfig.master_addr` and `master_port`. Every other host connects, and
starts and ends its process on orders of host 0. Both ends send a message at least every `PING_S`,
so an end that receives nothing for `LOST_AFTER_S` has lost the connection.
"""

import dataclasses
import socket
import threading
import time

import msgspec

import paxkv
from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.rank_place import RankPlace
from paxkv.errors import EngineDeadError

PING_S = 2.0
LOST_AFTER_S = 15.0
_MAX_LINE_BYTES = 1 << 20


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a host.

    Args:
        version: The version of paxkv.
        config: `shared_config`: section -> setting -> value.
    """

    rank: int
    version: str
    config: dict[str, dict[str, object]]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Host 0 does not accept the host."""

    reason: str


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """Start a process, after killing the one that runs.

    Args:
        generation: Counts the starts of the group.
    """

    generation: int
    config: EngineConfig
    place: RankPlace


class StopRank(msgspec.Struct, frozen=True, tag=True):
    """Kill the process."""


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """The process of a generation has ended."""

    generation: int
    reason: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Shows that the sender is alive."""


class GroupEnded(msgspec.Struct, frozen=True, tag=True):
    """The server was shut down, so the host's command ends too."""


HostMessage = Hello | Refused | StartRank | StopRank | RankEnded | Ping | GroupEnded
_DECODER = msgspec.json.Decoder(HostMessage)


class HostLink:
    """One end of a connection between two hosts.

    `send` may be called from any thread, `receive` from one. A thread sends the pings.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._socket.settimeout(LOST_AFTER_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = b""
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        threading.Thread(target=self._ping, name="paxkv-host-ping", daemon=True).start()

    def send(self, message: HostMessage) -> None:
        """Sends a message. A lost connection is reported by `receive`."""
        line = msgspec.json.encode(message) + b"\n"
        try:
            with self._lock:
                self._socket.sendall(line)
        except OSError:
            self.close()

    def receive(self) -> HostMessage:
        """Waits for a message other than a ping.

        Raises:
            EngineDeadError: The connection is lost, or the other end is no host of this version.
        """
        while True:
            message = self._next()
            if not isinstance(message, Ping):
                return message

    def close(self) -> None:
        """Closes the connection; the other end and a waiting `receive` notice it."""
        self._is_closed.set()
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed already

    def release(self) -> None:
        """Closes the connection at this end too. Call it on the thread that receives."""
        self.close()
        with self._lock:
            self._socket.close()

    def _next(self) -> HostMessage:
        while b"\n" not in self._received:
            if len(self._received) > _MAX_LINE_BYTES:
                raise EngineDeadError("the other host sent a message without an end.")
            try:
                data = self._socket.recv(1 << 16)
            except TimeoutError as error:
                raise EngineDeadError(
                    f"the other host sent nothing for {LOST_AFTER_S:g} seconds."
                ) from error
            except OSError as error:
                raise EngineDeadError(f"the connection is lost: {error}.") from error
            if not data:
                raise EngineDeadError("the other host has closed the connection.")
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        try:
            return _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise EngineDeadError(
                f"the other host sent an unknown message ({error}). Install the same paxkv on all "
                "hosts."
            ) from error

    def _ping(self) -> None:
        while not self._is_closed.wait(PING_S):
            self.send(Ping())


def hello_of(config: EngineConfig) -> Hello:
    """The first message of a host with these settings."""
    # Values as the other end decodes them.
    shared = msgspec.json.decode(msgspec.json.encode(shared_config(config)))
    return Hello(config.parallel.node_rank, paxkv.__version__, shared)


def shared_config(config: EngineConfig) -> EngineConfig:
    """The settings that must be the same on all hosts; without secrets, which are not sent."""
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, hf_token=None),
        parallel=dataclasses.replace(config.parallel, node_rank=0),
    )


def own_config(shared: EngineConfig, own: EngineConfig) -> EngineConfig:
    """Host 0's settings, with the token and the rank of this host."""
    return dataclasses.replace(
        shared,
        model=dataclasses.replace(shared.model, hf_token=own.model.hf_token),
        parallel=dataclasses.replace(shared.parallel, node_rank=own.parallel.node_rank),
    )


def why_refused(hello: Hello, config: EngineConfig) -> str | None:
    """The reason why host 0, with these settings, refuses a host; None if it accepts the host."""
    wanted = hello_of(config)
    if hello.version != wanted.version:
        return f"it has paxkv {hello.version}, and host 0 has {wanted.version}."
    if not 1 <= hello.rank < config.parallel.nnodes:
        return f"its --node-rank is {hello.rank}; expected 1 to {config.parallel.nnodes - 1}."
    differences = []
    for section in wanted.config | hello.config:
        theirs, ours = hello.config.get(section, {}), wanted.config.get(section, {})
        differences += [
            f"{name}={theirs.get(name)!r} (host 0: {ours.get(name)!r})"
            for name in ours | theirs
            if theirs.get(name) != ours.get(name)
        ]
    return f"its flags differ: {', '.join(differences)}." if differences else None


def connect(address: str, port: int, timeout_s: float) -> HostLink:
    """Connects to host 0, which may not have started yet.

    Raises:
        EngineDeadError: It could not be reached in time.
    """
    end_s = time.monotonic() + timeout_s
    while True:
        try:
            return HostLink(socket.create_connection((address, port), timeout=LOST_AFTER_S))
        except OSError as error:
            if time.monotonic() >= end_s:
                raise EngineDeadError(
                    f"host 0 could not be reached at {address}:{port} within {timeout_s:g} "
                    f"seconds: {error}. Check --master-addr, --master-port and the firewall."
                ) from error
            time.sleep(0.5)
