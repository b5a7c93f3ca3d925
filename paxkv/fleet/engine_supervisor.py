"""`EngineSupervisor`: runs one engine process and replaces it when it dies."""

import asyncio
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from paxkv.config.engine_config import EngineConfig
from paxkv.contracts.engine_output import EngineDead, EngineOutput
from paxkv.contracts.engine_request import EngineInput, Shutdown
from paxkv.contracts.engine_start import EngineReady, EngineStartOutput
from paxkv.errors import ConfigError, EngineDeadError, InvariantError
from paxkv.fleet.engine_process import ENGINE_COMMAND, EngineProcess, describe_end
from paxkv.fleet.follower_hosts import FollowerHosts
from paxkv.fleet.replica_places import same_sized_config
from paxkv.fleet.step_watch import StepWatch

logger = logging.getLogger(__name__)

SUPERVISOR_THREAD = "paxkv-engine-supervisor"
# Time for an engine's last message to arrive after its process exited, also on a busy machine.
_LAST_MESSAGE_S = 2.0
_MAX_PAUSE_S = 30.0
# Upper bound of `EngineDead.retry_after_s`. The first start may have compiled programs for minutes;
# a restart loads them from disk.
_MAX_RETRY_AFTER_S = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often the supervisor restarts an engine that died.

    Args:
        max_restarts: Maximum number of consecutive restarts; 0 disables restarts.
        window_s: An engine that has served for this long resets the count of restarts.
    """

    max_restarts: int
    window_s: float


class EngineSupervisor:
    """The `LoopTransport` of an engine process and of the processes that replace it.

    When an engine dies, the client receives `EngineDead`. Then it receives `EngineReady` after a
    restart, or a final `EngineDead` if no further restart is allowed. An engine that hangs is
    killed, which counts as a death.

    The supervisor's thread waits for processes; messages are delivered on the loop.

    Args:
        max_step_s: Kills the engine if a step, or waking up, takes this many seconds; 0 is no
            limit.
        stall_s: `stall` gives a reason after this many seconds without a completed step; 0 is no
            limit.
        max_idle_start_s: See `EngineProcess`.
        show_progress: The first engine draws a progress bar on stderr while it compiles programs.
        command: See `EngineProcess`, also for `environment`.
        hosts: Other hosts that compute for the engine. Their processes start and end with the
            engine's process. The supervisor closes them.
    """

    def __init__(
        self,
        config: EngineConfig,
        policy: RestartPolicy,
        *,
        max_step_s: float,
        max_idle_start_s: float,
        stall_s: float = 0.0,
        show_progress: bool = False,
        command: Sequence[str] = ENGINE_COMMAND,
        environment: Mapping[str, str] = MappingProxyType({}),
        hosts: FollowerHosts | None = None,
    ) -> None:
        self._config = config
        self._hosts = hosts
        self._step_watch = StepWatch(max_step_s)
        self._stall_watch = StepWatch(stall_s)
        self._is_stalled = False
        self._policy = policy
        self._command = command
        self._environment = environment
        self._max_idle_start_s = max_idle_start_s
        self._is_closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[EngineOutput | EngineReady], None] | None = None
        self._thread: threading.Thread | None = None
        # Deaths and failed starts since an engine last served for `policy.window_s`.
        self._num_consecutive = 0
        self._num_restarts = 0
        # The process whose messages the loop delivers.
        self._process_on_loop: EngineProcess | None = None
        # The engine died, and no other is ready yet.
        self._is_dead = threading.Event()
        # The client received the final `EngineDead`.
        self._is_end_reported = False
        self._start_s = time.monotonic()
        self._ready_s = math.inf
        self._start_took_s = 1.0
        # Why the last start failed; "" after a successful start.
        self._start_error = ""
        self._process = self._start_process(config, show_progress=show_progress)

    @property
    def pid(self) -> int:
        """The id of the running or starting process."""
        return self._process.pid

    def wait_until_ready(self, on_model_found: Callable[[Path], None]) -> EngineReady:
        """Waits for the first engine. Raises as `EngineProcess.wait_until_ready` does."""
        try:
            ready = self._process.wait_until_ready(on_model_found)
        except EngineDeadError as error:
            raise self._explained(error) from error
        self._record_ready()
        # Clients rely on these sizes, so restarted engines must have the same.
        self._config = same_sized_config(self._config, ready)
        return ready

    def send(self, message: EngineInput) -> None:
        """Queues a message for the running engine.

        Raises:
            EngineDeadError: No engine is running.
        """
        if isinstance(message, Shutdown):
            self._is_closing.set()
            if self._is_dead.is_set():
                # The engine that is being started has no requests to finish.
                self._process.kill()
        if self._is_dead.is_set():
            raise EngineDeadError("the engine has ended.")
        self._process.send(message)

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """Calls `on_message` on the loop with every message from now on. Call it on the loop."""
        self._loop, self._on_message = loop, on_message
        self._process.deliver_on(loop, self._on_process_message)
        self._process_on_loop = self._process
        if self._step_watch.limit_s > 0 or self._stall_watch.limit_s > 0:
            self._watch_steps()
        self._thread = threading.Thread(target=self._supervise, name=SUPERVISOR_THREAD, daemon=True)
        self._thread.start()

    @property
    def stall(self) -> str | None:
        """See `LoopTransport.stall`."""
        if not self._is_stalled or self._is_dead.is_set():
            return None
        return (
            f"no step has completed for {self._stall_watch.limit_s:g} seconds, the limit that "
            "--max-step-seconds sets. The device may hang, or its steps are slow."
        )

    def give_up(self, reason: str) -> None:
        """See `LoopTransport.give_up`. Kills the engine; the supervisor replaces it."""
        if self._is_dead.is_set():
            return
        logger.error("the engine process is killed: %s", reason)
        # Before the kill, so that messages that still arrive from this engine are ignored.
        self._on_death(reason)
        self._process.kill_with_traceback()

    def close(self) -> None:
        """Ends the engine and all restarts. Must not be called on the loop of `deliver_on`."""
        self._is_closing.set()
        self._process.end()
        if self._hosts is not None:
            self._hosts.close()
        if self._thread is None:
            self._process.release()
            return
        self._thread.join()

    def _supervise(self) -> None:
        """The body of the thread."""
        try:
            self._supervise_to_the_end()
        # Without this thread, the death of the engine would not be noticed. So end the engine.
        except Exception as error:
            logger.exception("the supervisor failed and cannot restart engines")
            self._start_error = f"{type(error).__name__}: {error}"
            self._process.end()
        self._on_loop(self._on_end)

    def _supervise_to_the_end(self) -> None:
        """Waits for the end of each process and starts the next, until no restart is allowed."""
        needs_engine = True
        while needs_engine:
            process = self._process
            code = process.wait()
            if code >= 0:
                # The engine has sent its `EngineDead`, which may not have arrived yet.
                self._is_dead.wait(_LAST_MESSAGE_S)
            needs_engine = self._on_loop(lambda p=process, c=code: self._on_exit(p, c))
            while needs_engine and not self._is_closing.is_set():
                if self._restart():
                    break
                needs_engine = self._on_loop(self._on_failed_start)

    def _restart(self) -> bool:
        """Starts an engine; False if the start failed for a reason other than `close`."""
        # 0, 1, 2, 4, ... seconds, because the cause of the failure may be temporary.
        pause_s = 0.0 if self._num_consecutive <= 1 else 2.0 ** (self._num_consecutive - 2)
        if self._is_closing.wait(min(pause_s, _MAX_PAUSE_S)):
            return True
        self._num_restarts += 1
        self._start_s = time.monotonic()
        logger.warning(
            "starting the engine again: restart %d of at most %d in a row",
            self._num_consecutive,
            self._policy.max_restarts,
        )
        try:
            process = self._start_process(
                _with_own_trace_file(self._config, self._num_restarts), show_progress=False
            )
        except (OSError, EngineDeadError) as error:
            self._start_error = f"{type(error).__name__}: {error}"
            logger.error("the engine process cannot be started: %s", error)
            return False
        self._process = process
        if self._is_closing.is_set():
            process.end()
        try:
            ready = process.wait_until_ready()
        except (ConfigError, EngineDeadError, InvariantError) as error:
            if not self._is_closing.is_set():
                self._start_error = str(self._explained(error))
                logger.error("the engine could not be started again: %s", self._start_error)
            process.end()
            process.release()
            return self._is_closing.is_set()
        self._record_ready()
        return self._on_loop(lambda: self._on_ready(process, ready))

    def _start_process(self, config: EngineConfig, *, show_progress: bool) -> EngineProcess:
        """Starts the engine's process, and the processes of the other hosts.

        Raises:
            EngineDeadError: Another host is missing.
        """
        # The first process of an engine is not there yet when a host ends.
        started: list[EngineProcess] = []
        place = None
        if self._hosts is not None:
            self._hosts.stop()
            place = self._hosts.start(config, lambda reason: self._on_host_end(started, reason))
        process = EngineProcess(
            config,
            show_progress=show_progress,
            command=self._command,
            environment=self._environment,
            max_idle_start_s=self._max_idle_start_s,
            place=place,
        )
        started.append(process)
        if self._hosts is not None and self._hosts.end_reason is not None:
            process.kill()
        return process

    def _on_host_end(self, started: Sequence[EngineProcess], reason: str) -> None:
        """Handles the end of another host's process, on a thread of `FollowerHosts`."""
        process = self._process_on_loop
        if process is not None and process in started and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.give_up, reason)
            return
        logger.error("the engine is killed: %s", reason)
        for each in started:
            each.kill()

    def _explained(self, error: Exception) -> Exception:
        """The error of a start, or the reason why another host killed the start."""
        reason = None if self._hosts is None else self._hosts.end_reason
        return error if reason is None else EngineDeadError(reason)

    def _on_loop(self, function: Callable[[], bool]) -> bool:
        """Calls a function on the loop and returns its result; False if the loop has closed."""
        results: list[bool] = []
        is_done = threading.Event()

        def call() -> None:
            try:
                results.append(function())
            finally:
                is_done.set()

        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            # The loop was closed without `close`, so the engine has no client left.
            self._process.end()
            return False
        while not is_done.wait(1.0):
            if self._loop.is_closed():
                return False
        return bool(results and results[0])

    def _on_process_message(self, message: EngineOutput | EngineStartOutput) -> None:
        """Handles a message of the current process, on the loop."""
        if self._is_dead.is_set():
            # A late message of an engine that was given up.
            return
        if isinstance(message, EngineDead):
            self._on_death(message.reason)
        else:
            self._on_message(message)

    def _on_exit(self, process: EngineProcess, code: int) -> bool:
        """Handles the exit of a process, on the loop; True if another engine must be started."""
        process.release()
        self._on_death("it was shut down" if self._is_closing.is_set() else describe_end(code))
        return self._may_restart()

    def _on_death(self, reason: str) -> None:
        """Reports an engine's death once, on the loop: at `EngineDead`, exit or `give_up`."""
        if self._is_dead.is_set():
            return
        self._is_dead.set()
        if time.monotonic() - self._ready_s >= self._policy.window_s:
            self._num_consecutive = 0
        self._num_consecutive += 1
        self._send_dead(reason)

    def _watch_steps(self) -> None:
        """Checks the step counter periodically, on the loop."""
        if self._is_end_reported:
            return
        watches = (self._step_watch, self._stall_watch)
        period_s = min(watch.period_s for watch in watches if watch.limit_s > 0)
        self._loop.call_later(period_s, self._watch_steps)
        # A starting engine computes no steps.
        if self._is_dead.is_set():
            return
        observed = (self._process.step_count, self._process.num_sent, time.monotonic())
        is_hanging, is_stalled = [watch.is_too_long(*observed) for watch in watches]
        if is_stalled != self._is_stalled:
            self._is_stalled = is_stalled
            if is_stalled:
                logger.warning("the engine has work, but %s", self.stall)
            else:
                logger.warning("the engine completes steps again")
        if is_hanging:
            self.give_up(
                f"it hangs: no step has ended for {self._step_watch.limit_s:g} seconds, the limit "
                "that --execute-model-timeout-s sets."
            )

    def _on_failed_start(self) -> bool:
        """Handles a failed start, on the loop; True if the supervisor must try again."""
        self._num_consecutive += 1
        if self._may_restart():
            return True
        self._send_dead(f"it could not be started again: {self._start_error}")
        return False

    def _on_ready(self, process: EngineProcess, ready: EngineReady) -> bool:
        self._is_dead.clear()
        self._step_watch.start_over()
        self._stall_watch.start_over()
        self._is_stalled = False
        process.deliver_on(self._loop, self._on_process_message)
        self._process_on_loop = process
        self._on_message(ready)
        return True

    def _on_end(self) -> bool:
        """Reports the final death, on the loop, when the supervisor's thread ends."""
        if not self._is_end_reported:
            self._is_closing.set()
            self._send_dead(self._start_error or "it was shut down")
        return False

    def _may_restart(self) -> bool:
        return not self._is_closing.is_set() and self._num_consecutive <= self._policy.max_restarts

    def _send_dead(self, reason: str) -> None:
        retry_after_s = None
        if self._may_restart():
            retry_after_s = min(max(math.ceil(self._start_took_s), 1), _MAX_RETRY_AFTER_S)
        self._is_end_reported = retry_after_s is None
        self._on_message(EngineDead(reason=reason, retry_after_s=retry_after_s))

    def _record_ready(self) -> None:
        self._start_error = ""
        self._ready_s = time.monotonic()
        self._start_took_s = self._ready_s - self._start_s


def _with_own_trace_file(config: EngineConfig, num_restarts: int) -> EngineConfig:
    """Gives a restarted engine its own trace file, because earlier ones may explain the failure."""
    if config.scheduler.trace_file is None:
        return config
    trace_file = f"{config.scheduler.trace_file}.restart-{num_restarts}"
    scheduler = dataclasses.replace(config.scheduler, trace_file=trace_file)
    return dataclasses.replace(config, scheduler=scheduler)
