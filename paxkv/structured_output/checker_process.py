"""`CheckerProcess`: tries to compile each new grammar in a process that can be killed.

llguidance's own limits are not enough: for a schema with thirty patterns that must all match, it
never finds out that no value fits, and a thread that computes cannot be stopped. So other processes
compile a grammar only after it was compiled here, within limits on time and memory.

One process reads the tokenizer, and forks a copy of itself for each grammar, which takes
milliseconds. Killing a copy does not affect other trials.
"""

import contextlib
import dataclasses
import errno
import gc
import hashlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NoReturn

import msgspec

import paxkv
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import EngineDeadError, InvalidRequestError, PaxkvError
from paxkv.structured_output.form_errors import FormError
from paxkv.structured_output.grammar_compiler import GrammarCompiler, form_key

logger = logging.getLogger(__name__)

# Processor time. An ordinary schema takes milliseconds.
QUICK_COMPILE_S = 0.05
MAX_COMPILE_S = 2.0
# Elapsed time per processor time, because other processes may need the processor too.
MAX_SLOWDOWN = 10
MAX_START_S = 60.0
# Long trials have a lower priority than the engine's steps and quick trials.
LONG_TRIAL_NICENESS = 5
# Limit on a process's address space, including the interpreter and the tokenizer.
MAX_BYTES = 4 * 2**30
MAX_REMEMBERED = 1024
MAX_LOGGED_KEYWORDS = 20


class _Setup(msgspec.Struct, frozen=True):
    """The first message to the process."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]
    thought_token_ids: tuple[int, int] | None


class _Trial(msgspec.Struct, frozen=True):
    """A grammar, and the processor time that it may take."""

    params: StructuredOutputsParams
    compile_s: float
    is_long: bool


class _Verdict(msgspec.Struct, frozen=True):
    """The answer to a setup or trial.

    Args:
        problem: As in `FormError`; None if the grammar was compiled. It does not name the request's
            field, because requests with the same form share a verdict.
        tool: As in `FormError`.
        compile_s: Processor time of the trial.
        ignored_keywords: Places of the keywords of JSON schemas that the grammar does not enforce.
    """

    problem: str | None
    tool: str | None = None
    compile_s: float = 0.0
    ignored_keywords: tuple[str, ...] = ()


class CheckerProcess:
    """A `GrammarChecker` for any number of threads. The process starts when it is first needed.

    Args:
        tokenizer_json: For this and the next three arguments, see `GrammarCompiler`.
        quick_compile_s: `check_quickly` gives up after this processor time.
        max_compile_s: `check` rejects a grammar after this processor time.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        thought_token_ids: tuple[int, int] | None = None,
        quick_compile_s: float = QUICK_COMPILE_S,
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        self._setup = _Setup(tokenizer_json, vocab_size, list(eos_token_ids), thought_token_ids)
        self._quick_compile_s, self._max_compile_s = quick_compile_s, max_compile_s
        self._lock = threading.Lock()
        self._start_lock = threading.Lock()
        self._is_closed = False
        # Contains at most one process.
        self._running: list[_Forker] = []
        # Ends the process even without a call of `close`, and when the interpreter ends.
        self._end_running = weakref.finalize(self, _end_all, self._running)
        # Digest of a grammar, which itself may be long -> verdict, the latest one last.
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """See `GrammarChecker`."""
        with self._lock:
            return _digest(params) in self._verdicts

    def is_heavy(self, params: StructuredOutputsParams) -> bool:
        """See `GrammarChecker`."""
        with self._lock:
            verdict = self._verdicts.get(_digest(params))
        return verdict is not None and verdict.compile_s > self._quick_compile_s

    def ignored_keywords(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """See `GrammarChecker`."""
        with self._lock:
            verdict = self._verdicts.get(_digest(params))
        return () if verdict is None else verdict.ignored_keywords

    def check_quickly(self, params: StructuredOutputsParams) -> bool:
        """See `GrammarChecker`."""
        return self._check(params, self._quick_compile_s, is_long=False)

    def check(self, params: StructuredOutputsParams) -> None:
        """See `GrammarChecker`."""
        if not self._check(params, self._max_compile_s, is_long=True):
            problem = (
                f"cannot be compiled within {self._max_compile_s:g} s and {MAX_BYTES >> 30} GB; "
                "send a simpler one."
            )
            self._remember(params, _Verdict(problem, compile_s=self._max_compile_s))
            raise FormError(params, problem)

    def close(self) -> None:
        """Ends the process and all trials."""
        with self._start_lock:
            self._is_closed = True
            _end_all(self._running)

    def _check(self, params: StructuredOutputsParams, compile_s: float, *, is_long: bool) -> bool:
        """Whether the grammar was compiled in time, now or before."""
        with self._lock:
            verdict = self._verdicts.get(_digest(params))
        if verdict is None:
            verdict = self._ask(_Trial(_as_text(params), compile_s, is_long))
            if verdict is None:
                return False
            self._remember(params, verdict)
            if verdict.ignored_keywords:
                logger.warning(
                    "no grammar can enforce these keywords of a JSON schema, so they are ignored: "
                    "%s",
                    ", ".join(verdict.ignored_keywords[:MAX_LOGGED_KEYWORDS]),
                )
        if verdict.problem is not None:
            raise FormError(params, verdict.problem, tool=verdict.tool)
        return True

    def _remember(self, params: StructuredOutputsParams, verdict: _Verdict) -> None:
        with self._lock:
            self._verdicts[_digest(params)] = verdict
            if len(self._verdicts) > MAX_REMEMBERED:
                self._verdicts.popitem(last=False)

    def _ask(self, trial: _Trial) -> _Verdict | None:
        """Sends a trial to the process. Returns None if a limit was reached."""
        for _ in range(2):
            forker = self._forker()
            # Slightly longer than the trial's own limit.
            reply = forker.ask(trial, timeout_s=trial.compile_s * MAX_SLOWDOWN + 1)
            if reply is not None or not forker.ends_now():
                return reply
            # The process was killed by others, together with the trial.
        raise PaxkvError("the process that compiles grammars ended twice; see stderr.")

    def _forker(self) -> "_Forker":
        with self._start_lock:
            if self._is_closed:
                raise EngineDeadError("the engine is shutting down.")
            if self._running and not self._running[0].is_alive:
                _end_all(self._running)
            if not self._running:
                self._running.append(_Forker(self._setup))
            return self._running[0]


class _Forker:
    """The process that forks a copy for each trial. Creating this object starts the process.

    Raises:
        PaxkvError: The process did not start.
    """

    def __init__(self, setup: _Setup) -> None:
        root = str(Path(paxkv.__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        # Each question has its own connection, whose other end is sent over this one.
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paxkv.structured_output.checker_process"],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                # Signals to the server's group do not reach it; it ends when its input does.
                start_new_session=True,
                # A forked copy would not have NumPy's threads.
                env=os.environ | {"PYTHONPATH": search, "OPENBLAS_NUM_THREADS": "1"},
            )
        if self.ask(setup, timeout_s=MAX_START_S) is None:
            self.end()
            raise PaxkvError("the process that compiles grammars did not start; see stderr.")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ends_now(self) -> bool:
        """Whether the process has ended. Its connections end a moment earlier."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        return not self.is_alive

    def ask(self, question: _Setup | _Trial, *, timeout_s: float) -> _Verdict | None:
        """Returns None if no answer arrives in time, or if the process or its copy has ended."""
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as replies:
            ours.settimeout(timeout_s)
            try:
                with theirs:
                    socket.send_fds(self._control, [b"?"], [theirs.fileno()])
                ours.sendall(msgspec.json.encode(question) + b"\n")
                line = replies.readline()
            # The process has ended, or its copy has ended or takes too long.
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                return None
            except OSError as error:
                if error.errno == errno.EBADF:
                    return None  # `end` came first
                raise
            return msgspec.json.decode(line, type=_Verdict) if line else None

    def end(self) -> None:
        """Kills the process and its copies, which are in the same process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()


def _digest(params: StructuredOutputsParams) -> bytes:
    """Digest of what a verdict depends on: everything except the field that contained the form."""
    return hashlib.sha256(msgspec.json.encode((*form_key(params), params.thoughts))).digest()


def _as_text(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """The same with a schema as text: msgspec would encode a NaN in the schema as null."""
    if not isinstance(params.json, dict):
        return params
    return dataclasses.replace(params, json=params.source_text)


def _end_all(running: list[_Forker]) -> None:
    while running:
        running.pop().end()


def serve(control: socket.socket) -> None:
    """The process's main loop: forks a copy for each question until `control` is closed."""
    # Copies that have ended do not stay as zombies.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with _next_connection(control) as connection:
        setup = msgspec.json.decode(connection.readline(), type=_Setup)
        compiler = GrammarCompiler(
            setup.tokenizer_json,
            vocab_size=setup.vocab_size,
            eos_token_ids=setup.eos_token_ids,
            thought_token_ids=setup.thought_token_ids,
        )
        # Reads the tokenizer, so that copies need not.
        _answer(connection, compiler, StructuredOutputsParams(json_object=True))
    # Excludes the objects that all copies share from their garbage collection.
    gc.freeze()
    while True:
        try:
            connection = _next_connection(control)
        except EOFError:
            return
        with connection:
            if os.fork() == 0:
                control.close()
                _run_copy(connection, compiler)


def _run_copy(connection: BinaryIO, compiler: GrammarCompiler) -> NoReturn:
    """Answers a trial in a copy, and then always ends the copy."""
    try:
        # Hides what llguidance writes to stderr about each grammar that it gives up.
        stderr_fd = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        answer_trial(connection, compiler)
    except Exception:
        os.dup2(stderr_fd, 2)
        traceback.print_exc()
    finally:
        os._exit(0)


def answer_trial(connection: BinaryIO, compiler: GrammarCompiler) -> None:
    """Answers a trial. If a limit is reached, the process ends without an answer."""
    trial = msgspec.json.decode(connection.readline(), type=_Trial)
    # The signals of these timers end the process even while llguidance computes.
    signal.setitimer(signal.ITIMER_PROF, trial.compile_s)
    signal.setitimer(signal.ITIMER_REAL, trial.compile_s * MAX_SLOWDOWN)
    if trial.is_long:
        os.nice(LONG_TRIAL_NICENESS)
    _answer(connection, compiler, trial.params)


def _answer(
    connection: BinaryIO, compiler: GrammarCompiler, params: StructuredOutputsParams
) -> None:
    problem, tool, ignored_keywords = None, None, ()
    start_s = time.process_time()
    try:
        ignored_keywords = compiler.check(params)
    except FormError as error:
        problem, tool = error.problem, error.tool
    except InvalidRequestError as error:
        problem = f"cannot be compiled: {error}"
    verdict = _Verdict(problem, tool, time.process_time() - start_s, ignored_keywords)
    # The other process may no longer wait for the answer.
    with contextlib.suppress(BrokenPipeError):
        connection.write(msgspec.json.encode(verdict) + b"\n")
        connection.flush()


def _next_connection(control: socket.socket) -> BinaryIO:
    """Waits for a connection. Raises EOFError if `control` is closed."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:
        raise EOFError
    with socket.socket(fileno=descriptors[0]) as connection:
        return connection.makefile("rwb")


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415  Missing on some systems; there, only time is limited.
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


if __name__ == "__main__":
    _limit_memory()
    with socket.socket(fileno=0) as control:
        serve(control)
