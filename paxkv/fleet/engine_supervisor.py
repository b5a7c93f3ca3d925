"""`EngineSupervisor`: keeps one engine process running, and starts another where one died."""

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
from paxkv.fleet.replica_places import same_sized_config
from paxkv.fleet.step_watch import StepWatch

logger = logging.getLogger(__name__)

SUPERVISOR_THREAD = "paxkv-engine-supervisor"
# What an engine said before it exited is with us by then, however busy the machine is.
_LAST_WORDS_S = 2.0
_MAX_PAUSE_S = 30.0
# What clients are told at most: the next start finds its programs, which the first one may have had
# to compile for minutes.
_MAX_RETRY_AFTER_S = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How often an engine that died is started again.

    Args:
        max_restarts: In a row; 0 is never.
        window_s: An engine that has served for so long ends the row.
    """

    max_restarts: int
    window_s: float


class EngineSupervisor:
    """The `LoopTransport` of an engine process and of those that take its place.

    Its thread only waits for processes; messages come on the loop. When one dies, the client hears
    `EngineDead`; then `EngineReady`, or, when none may be started any more, a last `EngineDead`.
    One that hangs is killed, and has died then.

    Args:
        max_step_s: Kills the engine if a step, or waking up, takes this many seconds; 0 is no
            limit.
        stall_s: `stall` gives a reason after this many seconds without a completed step; 0 is no
            limit.
        max_idle_start_s: As `EngineProcess` has it.
        show_progress: The first engine draws a bar on stderr while steps compile.
        command: As `EngineProcess` has it; `environment` likewise.
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
    ) -> None:
        self._config = config
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
        # In the present row, and altogether.
        self._num_in_row = 0
        self._num_restarts = 0
        # Of the engine that ran last.
        self._is_dead = threading.Event()
        self._is_end_told = False
        self._start_s = time.monotonic()
        self._ready_s = math.inf
        self._start_took_s = 1.0
        # Why the last one failed.
        self._start_error = ""
        self._process = EngineProcess(
            config,
            show_progress=show_progress,
            command=command,
            environment=environment,
            max_idle_start_s=max_idle_start_s,
        )

    @property
    def pid(self) -> int:
        """Of the process that runs, or is being started."""
        return self._process.pid

    def wait_until_ready(self, on_model_found: Callable[[Path], None]) -> EngineReady:
        """Waits for the first engine. Raises as `EngineProcess.wait_until_ready` does."""
        ready = self._process.wait_until_ready(on_model_found)
        self._note_ready()
        # Clients know these sizes, so a restarted engine must have them too.
        self._config = same_sized_config(self._config, ready)
        return ready

    def send(self, message: EngineInput) -> None:
        """Queues a message for the engine that runs.

        Raises:
            EngineDeadError: None does.
        """
        if isinstance(message, Shutdown):
            # Its end is wanted.
            self._is_closing.set()
            if self._is_dead.is_set():
                # What is being started has nothing to finish.
                self._process.kill()
        if self._is_dead.is_set():
            raise EngineDeadError("the engine has ended.")
        self._process.send(message)

    def deliver_on(
        self,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[EngineOutput | EngineReady], None],
    ) -> None:
        """Calls `on_message` on the loop with every message from now on. Called on the loop."""
        self._loop, self._on_message = loop, on_message
        self._process.deliver_on(loop, self._take)
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
        """See `LoopTransport.give_up`: the engine is killed, and replaced as one that died."""
        if self._is_dead.is_set():
            return
        logger.error("the engine process is killed: %s", reason)
        # First, so that what it still says is not taken for the next engine's.
        self._on_death(reason)
        self._process.kill_with_traceback()

    def close(self) -> None:
        """Ends the engine, and starts none any more. Not called on the loop of `deliver_on`."""
        self._is_closing.set()
        self._process.end()
        if self._thread is None:
            self._process.release()
            return
        self._thread.join()

    def _supervise(self) -> None:
        """The thread's body."""
        try:
            self._supervise_to_the_end()
        # Whatever it is, nobody would notice an engine's end any more.
        except Exception as error:
            logger.exception("engines cannot be started any more")
            self._start_error = f"{type(error).__name__}: {error}"
            self._process.end()
        self._on_loop(self._on_end)

    def _supervise_to_the_end(self) -> None:
        """From the end of one process to the end of the next."""
        is_wanted = True
        while is_wanted:
            process = self._process
            code = process.wait()
            if code >= 0:
                # It has said why, which may still be on its way.
                self._is_dead.wait(_LAST_WORDS_S)
            is_wanted = self._on_loop(lambda p=process, c=code: self._on_exit(p, c))
            while is_wanted and not self._is_closing.is_set():
                if self._restart():
                    break
                is_wanted = self._on_loop(self._on_failed_start)

    def _restart(self) -> bool:
        """Starts an engine; False if that failed and was not interrupted by `close`."""
        # 0, 1, 2, 4, ... seconds: what made it fail may pass.
        pause_s = 0.0 if self._num_in_row <= 1 else 2.0 ** (self._num_in_row - 2)
        if self._is_closing.wait(min(pause_s, _MAX_PAUSE_S)):
            return True
        self._num_restarts += 1
        self._start_s = time.monotonic()
        logger.warning(
            "starting the engine again: %d of %d times in a row",
            self._num_in_row,
            self._policy.max_restarts,
        )
        try:
            process = EngineProcess(
                _traced_elsewhere(self._config, self._num_restarts),
                show_progress=False,
                command=self._command,
                environment=self._environment,
                max_idle_start_s=self._max_idle_start_s,
            )
        except OSError as error:
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
                self._start_error = str(error)
                logger.error("the engine could not be started again: %s", error)
            process.end()
            process.release()
            return self._is_closing.is_set()
        self._note_ready()
        return self._on_loop(lambda: self._on_ready(process, ready))

    def _on_loop(self, function: Callable[[], bool]) -> bool:
        """Calls a function on the loop and returns its result; False when the loop has gone."""
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
            # Closed without `close`: nobody is left to hear.
            self._process.end()
            return False
        while not is_done.wait(1.0):
            if self._loop.is_closed():
                return False
        return bool(results and results[0])

    def _take(self, message: EngineOutput | EngineStartOutput) -> None:
        """A message of the process that runs, on the loop."""
        if self._is_dead.is_set():
            # What is on its way from an engine that was given up.
            return
        if isinstance(message, EngineDead):
            self._on_death(message.reason)
        else:
            self._on_message(message)

    def _on_exit(self, process: EngineProcess, code: int) -> bool:
        """On the loop; whether another engine is to be started."""
        process.release()
        self._on_death("it was shut down" if self._is_closing.is_set() else describe_end(code))
        return self._may_restart()

    def _on_death(self, reason: str) -> None:
        """On the loop, at the engine's own last message or at its exit."""
        if self._is_dead.is_set():
            return
        self._is_dead.set()
        if time.monotonic() - self._ready_s >= self._policy.window_s:
            self._num_in_row = 0
        self._num_in_row += 1
        self._tell_dead(reason)

    def _watch_steps(self) -> None:
        """Looks at the count of steps periodically, on the loop."""
        if self._is_end_told:
            return
        watches = (self._step_watch, self._stall_watch)
        period_s = min(watch.period_s for watch in watches if watch.limit_s > 0)
        self._loop.call_later(period_s, self._watch_steps)
        # An engine that is being started computes no step, however long the start takes.
        if self._is_dead.is_set():
            return
        look = (self._process.step_count, self._process.num_sent, time.monotonic())
        is_hanging, is_stalled = [watch.is_too_long(*look) for watch in watches]
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
        """On the loop; whether to try again."""
        self._num_in_row += 1
        if self._may_restart():
            return True
        self._tell_dead(f"it could not be started again: {self._start_error}")
        return False

    def _on_ready(self, process: EngineProcess, ready: EngineReady) -> bool:
        self._is_dead.clear()
        self._step_watch.start_over()
        self._stall_watch.start_over()
        self._is_stalled = False
        process.deliver_on(self._loop, self._take)
        self._on_message(ready)
        return True

    def _on_end(self) -> bool:
        """On the loop: nothing is started any more."""
        if not self._is_end_told:
            self._is_closing.set()
            self._tell_dead(self._start_error or "it was shut down")
        return False

    def _may_restart(self) -> bool:
        return not self._is_closing.is_set() and self._num_in_row <= self._policy.max_restarts

    def _tell_dead(self, reason: str) -> None:
        retry_after_s = None
        if self._may_restart():
            retry_after_s = min(max(math.ceil(self._start_took_s), 1), _MAX_RETRY_AFTER_S)
        self._is_end_told = retry_after_s is None
        self._on_message(EngineDead(reason=reason, retry_after_s=retry_after_s))

    def _note_ready(self) -> None:
        self._start_error = ""
        self._ready_s = time.monotonic()
        self._start_took_s = self._ready_s - self._start_s


def _traced_elsewhere(config: EngineConfig, num_restarts: int) -> EngineConfig:
    """A trace of its own for each engine: the first one's may show why it died."""
    if config.scheduler.trace_file is None:
        return config
    trace_file = f"{config.scheduler.trace_file}.restart-{num_restarts}"
    scheduler = dataclasses.replace(config.scheduler, trace_file=trace_file)
    return dataclasses.replace(config, scheduler=scheduler)
