"""`CheckerProcess`: compiles grammars on trial in processes of their own, which can be ended.

The limits of llguidance do not hold everywhere: a schema with thirty patterns that all must fit
takes for ever to be found impossible, and a thread that computes cannot be stopped. So nobody
else compiles a grammar that has not been compiled here, in time and within a limit of memory.

One process reads the tokenizer and is then copied (`fork`) for each grammar, which takes
milliseconds. So a trial that is ended costs nobody else anything.
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

# Seconds of a processor. An ordinary schema takes milliseconds.
QUICK_COMPILE_S = 0.05
MAX_COMPILE_S = 2.0
# Seconds of a clock, for each of them: others may need the processor too.
MAX_SLOWDOWN = 10
MAX_START_S = 60.0
# A long trial gives way to the engine's steps, and to quick ones.
LONG_TRIAL_NICENESS = 5
# Of a process's address space, the interpreter and the tokenizer included.
MAX_BYTES = 4 * 2**30
MAX_REMEMBERED = 1024
MAX_LOGGED_KEYWORDS = 20


class _Setup(msgspec.Struct, frozen=True):
    """What the process is told first."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]
    thought_token_ids: tuple[int, int] | None


class _Trial(msgspec.Struct, frozen=True):
    """A grammar, and the seconds of a processor that it may take."""

    params: StructuredOutputsParams
    compile_s: float
    is_long: bool


class _Verdict(msgspec.Struct, frozen=True):
    """The answer to either; `problem` is None where all is well. Took `compile_s` of a processor.

    `problem` and `tool` are those of a `FormError`. Requests with the same form share a verdict,
    and may have sent the form in different fields, so the field's name is not part of it.

    The grammar does not enforce the keywords of JSON schemas at `ignored_keywords`.
    """

    problem: str | None
    tool: str | None = None
    compile_s: float = 0.0
    ignored_keywords: tuple[str, ...] = ()


class CheckerProcess:
    """A `GrammarChecker`, for any number of threads. The process starts when it is first needed.

    Args:
        tokenizer_json: And what follows, as for `GrammarCompiler`.
        quick_compile_s: What takes longer is left open by `check_quickly`.
        max_compile_s: What takes longer is refused.
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
        # None or one.
        self._running: list[_Forker] = []
        # Also when nobody closes it, and at the interpreter's end.
        self._end_running = weakref.finalize(self, _end_all, self._running)
        # By the digest of a grammar, which may be long itself; the most recent one last.
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
        """Ends the process, and what is on trial."""
        with self._start_lock:
            self._is_closed = True
            _end_all(self._running)

    def _check(self, params: StructuredOutputsParams, compile_s: float, *, is_long: bool) -> bool:
        """Whether it was compiled in time, or is remembered."""
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
        """None where a limit was reached."""
        for _ in range(2):
            forker = self._forker()
            # A bit longer than the trial has, which ends itself.
            reply = forker.ask(trial, timeout_s=trial.compile_s * MAX_SLOWDOWN + 1)
            if reply is not None or not forker.ends_now():
                return reply
            # It was killed from outside, and whatever it was asked with it.
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
    """The process that is copied, seen from outside. Starts with it.

    Raises:
        PaxkvError: It did not start.
    """

    def __init__(self, setup: _Setup) -> None:
        root = str(Path(paxkv.__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        # Each question is a connection of its own, whose other end is sent over this one.
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "paxkv.structured_output.checker_process"],
                stdin=theirs,
                stdout=subprocess.DEVNULL,
                # Signals to the server's group end it by the end of its input, not in the middle.
                start_new_session=True,
                # Threads of NumPy's would be missing in a copy.
                env=os.environ | {"PYTHONPATH": search, "OPENBLAS_NUM_THREADS": "1"},
            )
        if self.ask(setup, timeout_s=MAX_START_S) is None:
            self.end()
            raise PaxkvError("the process that compiles grammars did not start; see stderr.")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def ends_now(self) -> bool:
        """Whether it has ended; its connections end a moment earlier."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)
        return not self.is_alive

    def ask(self, question: _Setup | _Trial, *, timeout_s: float) -> _Verdict | None:
        """None when there is no answer in time, or whoever was to answer has ended."""
        ours, theirs = socket.socketpair()
        with ours, ours.makefile("rb") as replies:
            ours.settimeout(timeout_s)
            try:
                with theirs:
                    socket.send_fds(self._control, [b"?"], [theirs.fileno()])
                ours.sendall(msgspec.json.encode(question) + b"\n")
                line = replies.readline()
            # Nobody listens any more, or took the question and ended, or takes too long.
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                return None
            except OSError as error:
                if error.errno == errno.EBADF:
                    return None  # `end` came first
                raise
            return msgspec.json.decode(line, type=_Verdict) if line else None

    def end(self) -> None:
        """Also what is on trial: its copies are in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._control.close()


def _digest(params: StructuredOutputsParams) -> bytes:
    """Of what a verdict depends on; the field that the form was sent in is not part of it."""
    return hashlib.sha256(msgspec.json.encode((*form_key(params), params.thoughts))).digest()


def _as_text(params: StructuredOutputsParams) -> StructuredOutputsParams:
    """With a schema as text: the codec of trials would write NaN, which it may have, as null."""
    if not isinstance(params.json, dict):
        return params
    return dataclasses.replace(params, json=params.source_text)


def _end_all(running: list[_Forker]) -> None:
    while running:
        running.pop().end()


def serve(control: socket.socket) -> None:
    """What the process does: a copy of it for each question, until there are no more."""
    # Copies that have ended leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with _next_connection(control) as connection:
        setup = msgspec.json.decode(connection.readline(), type=_Setup)
        compiler = GrammarCompiler(
            setup.tokenizer_json,
            vocab_size=setup.vocab_size,
            eos_token_ids=setup.eos_token_ids,
            thought_token_ids=setup.thought_token_ids,
        )
        # Now, so that no copy has to read the tokenizer.
        _answer(connection, compiler, StructuredOutputsParams(json_object=True))
    # What is there now is shared by all copies, and not looked at by their collectors.
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
    """Nothing of the copied process runs behind this, whatever happens."""
    try:
        # llguidance writes there, of each grammar that it gives up.
        stderr_fd = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        answer_trial(connection, compiler)
    except Exception:
        os.dup2(stderr_fd, 2)
        traceback.print_exc()
    finally:
        os._exit(0)


def answer_trial(connection: BinaryIO, compiler: GrammarCompiler) -> None:
    """What a copy does; reaching a limit ends it without an answer."""
    trial = msgspec.json.decode(connection.readline(), type=_Trial)
    # Their signals end it also while it computes.
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
    # Whoever asked may have given up.
    with contextlib.suppress(BrokenPipeError):
        connection.write(msgspec.json.encode(verdict) + b"\n")
        connection.flush()


def _next_connection(control: socket.socket) -> BinaryIO:
    """Raises: EOFError: there will be none."""
    _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
    if not descriptors:
        raise EOFError
    with socket.socket(fileno=descriptors[0]) as connection:
        return connection.makefile("rwb")


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415  Not everywhere: elsewhere the time limit has to do.
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


if __name__ == "__main__":
    _limit_memory()
    with socket.socket(fileno=0) as control:
        serve(control)
