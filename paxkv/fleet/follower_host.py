"""`FollowerHost`: starts and ends this host's process of an engine, on orders of host 0."""

import logging
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from paxkv.config.engine_config import EngineConfig
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet.engine_process import ENGINE_COMMAND, EngineProcess
from paxkv.fleet.host_messages import (
    GroupEnded,
    HostLink,
    RankEnded,
    Refused,
    StartRank,
    StopRank,
    connect,
    hello_of,
    own_config,
)

logger = logging.getLogger(__name__)


class FollowerHost:
    """The command of a host with `node_rank` above 0. It serves no requests.

    Args:
        max_idle_start_s: See `EngineProcess`, also for `command` and `environment`.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        max_idle_start_s: float,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._config = config
        self._max_idle_start_s = max_idle_start_s
        self._command = command
        self._environment = environment
        self._process: EngineProcess | None = None
        self._watcher: threading.Thread | None = None

    def run(self) -> None:
        """Follows the orders of host 0 until the server there is shut down.

        Raises:
            ConfigError: Host 0 does not accept this host.
            EngineDeadError: Host 0 cannot be reached, or the connection is lost.
        """
        parallel = self._config.parallel
        address, port = parallel.master_addr, parallel.master_port
        link = connect(address, port, parallel.distributed_timeout_seconds)
        try:
            link.send(hello_of(self._config))
            logger.info("connected to host 0 at %s:%d", address, port)
            self._follow(link)
        except EngineDeadError as error:
            raise EngineDeadError(f"host 0 at {address}:{port} is lost: {error}") from error
        finally:
            self._kill()
            link.release()

    def _follow(self, link: HostLink) -> None:
        while True:
            match link.receive():
                case StartRank() as order:
                    self._kill()
                    self._start(order, link)
                case StopRank():
                    self._kill()
                case Refused(reason=reason):
                    raise ConfigError(f"host 0 does not accept this host: {reason}")
                case GroupEnded():
                    logger.info("host 0 was shut down")
                    return
                case other:
                    raise EngineDeadError(f"it sent an unexpected {type(other).__name__}.")

    def _start(self, order: StartRank, link: HostLink) -> None:
        try:
            process = EngineProcess(
                own_config(order.config, self._config),
                show_progress=False,
                command=self._command,
                environment=self._environment,
                max_idle_start_s=self._max_idle_start_s,
                place=order.place,
            )
        except OSError as error:
            link.send(RankEnded(order.generation, f"it cannot be started: {error}"))
            return
        logger.info("started process %d of rank %d", process.pid, order.place.rank)
        self._process = process

        def watch() -> None:
            reason = process.wait_until_ended()
            process.kill()
            process.wait()
            logger.warning("process %d has ended: %s", process.pid, reason)
            link.send(RankEnded(order.generation, reason))

        self._watcher = threading.Thread(target=watch, name="paxkv-rank-watch", daemon=True)
        self._watcher.start()

    def _kill(self) -> None:
        """Kills the process, if there is one, and waits until it has ended."""
        if self._process is None:
            return
        self._process.kill()
        self._watcher.join()
        self._process.release()
        self._process = None
