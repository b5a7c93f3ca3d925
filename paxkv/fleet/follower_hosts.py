"""`FollowerHosts`: host 0's end of the connections to the other hosts of an engine."""

import logging
import socket
import threading
import time
from collections.abc import Callable

from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.rank_place import RankPlace
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet.host_messages import (
    GroupEnded,
    Hello,
    HostLink,
    RankEnded,
    Refused,
    StartRank,
    StopRank,
    shared_config,
    why_refused,
)

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class FollowerHosts:
    """Starts and ends the processes of the other hosts, and notices when one ends.

    All processes of an engine start and end together, because each step needs them all. A start
    uses new ports, so that no process of an earlier start can take part.

    Args:
        config: The settings that host 0 was started with.

    Raises:
        ConfigError: The port cannot be opened.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        parallel = config.parallel
        self._ranks = range(1, parallel.nnodes)
        self._links: dict[int, HostLink] = {}
        self._lock = threading.Lock()
        self._generation = 0
        self._is_closed = threading.Event()
        # Why the last generation has ended; None while it runs.
        self._end_reason: str | None = None
        self._on_end: Callable[[str], None] = logger.error
        try:
            self._listener = socket.create_server(
                (parallel.master_addr, parallel.master_port), reuse_port=False
            )
        except OSError as error:
            raise ConfigError(
                f"the other hosts cannot connect to {parallel.master_addr}:{parallel.master_port}: "
                f"{error}. Set --master-addr to an address of this host and --master-port to a "
                "free port."
            ) from error
        threading.Thread(target=self._accept, name="paxkv-hosts", daemon=True).start()

    @property
    def end_reason(self) -> str | None:
        """Why a process of another host has ended since the last `start`; None if none has."""
        return self._end_reason

    def start(self, config: EngineConfig, on_end: Callable[[str], None]) -> RankPlace:
        """Waits for all hosts, and starts their processes.

        Args:
            config: The settings of the processes. They may contain sizes from an earlier start.
            on_end: Called once, from another thread, when a process has ended; gets the reason.

        Returns:
            The place of this host's process.

        Raises:
            EngineDeadError: A host did not connect in time, or `close` was called.
        """
        parallel = config.parallel
        self._wait_for_hosts(parallel.distributed_timeout_seconds)
        coordinator, calls = (
            f"{parallel.master_addr}:{_free_port(parallel.master_addr)}" for _ in range(2)
        )
        places = [
            RankPlace(
                rank=rank,
                num_ranks=parallel.nnodes,
                coordinator=coordinator,
                calls_endpoint=f"tcp://{calls}",
                timeout_s=parallel.distributed_timeout_seconds,
            )
            for rank in range(parallel.nnodes)
        ]
        with self._lock:
            self._generation += 1
            self._end_reason, self._on_end = None, on_end
            links = dict(self._links)
        shared = shared_config(config)
        for rank in self._ranks:
            if rank in links:
                links[rank].send(StartRank(self._generation, shared, places[rank]))
            else:
                self._end_generation(f"the connection to host {rank} is lost.")
        return places[0]

    def stop(self) -> None:
        """Kills the processes of the other hosts."""
        with self._lock:
            self._generation += 1  # so that the ends of these processes are ignored
            links = list(self._links.values())
        for link in links:
            link.send(StopRank())

    def close(self) -> None:
        """Ends the commands of the other hosts; may be repeated."""
        self._is_closed.set()
        with self._lock:
            links = list(self._links.values())
        for link in links:
            link.send(GroupEnded())
            link.close()
        # Wakes the thread that accepts connections.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()

    def _wait_for_hosts(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        is_logged = False
        while missing := [rank for rank in self._ranks if rank not in self._links]:
            if self._is_closed.wait(_POLL_S):
                raise EngineDeadError("it was shut down")
            if time.monotonic() >= end_s:
                raise EngineDeadError(
                    f"hosts {missing} did not connect within {timeout_s:g} seconds. Start the same "
                    "command there, with their --node-rank."
                )
            if not is_logged:
                logger.info("waiting for hosts %s", missing)
                is_logged = True

    def _accept(self) -> None:
        """Runs in a thread, and starts a thread for each connection."""
        while not self._is_closed.is_set():
            try:
                connected, address = self._listener.accept()
            except OSError:
                return  # `close` closed it
            threading.Thread(
                target=self._serve, args=(HostLink(connected), address[0]), daemon=True
            ).start()

    def _serve(self, link: HostLink, address: str) -> None:
        """Reads the messages of one host, in a thread of its own."""
        try:
            hello = link.receive()
            reason = self._add(hello, link)
        except EngineDeadError as error:
            reason = str(error)
        if reason is not None:
            logger.error("a host at %s cannot take part: %s", address, reason)
            link.send(Refused(reason))
            link.release()
            return
        rank = hello.rank
        logger.info("host %d has connected from %s", rank, address)
        try:
            while True:
                message = link.receive()
                if isinstance(message, RankEnded) and message.generation == self._generation:
                    self._end_generation(f"the process of host {rank} has ended: {message.reason}")
        except EngineDeadError as error:
            with self._lock:
                del self._links[rank]
            if not self._is_closed.is_set():
                self._end_generation(f"host {rank} is lost: {error}")
        finally:
            link.release()

    def _add(self, hello: object, link: HostLink) -> str | None:
        """Adds a host; returns the reason if it cannot take part."""
        if not isinstance(hello, Hello):
            return f"its first message is a {type(hello).__name__}."
        if reason := why_refused(hello, self._config):
            return reason
        with self._lock:
            if hello.rank in self._links:
                return f"another host with --node-rank {hello.rank} is connected."
            self._links[hello.rank] = link
        return None

    def _end_generation(self, reason: str) -> None:
        with self._lock:
            if self._end_reason is not None:
                return
            self._end_reason, on_end = reason, self._on_end
        on_end(reason)


def _free_port(address: str) -> int:
    with socket.create_server((address, 0)) as found:
        return found.getsockname()[1]
