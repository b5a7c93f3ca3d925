"""`CheckerProcess`: compiles grammars on trial in a process of its own, which can be ended.

The limits of llguidance do not hold everywhere: a schema with thirty patterns that all must fit
takes for ever to be found impossible, and a thread that computes cannot be stopped. So nobody
else compiles a grammar that has not been compiled here, in time and within a limit of memory.
"""

import faulthandler
import hashlib
import os
import select
import subprocess
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

import paxkv
from paxkv.errors import InvalidRequestError, PaxkvError
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_outputs_params import StructuredOutputsParams

# An ordinary schema takes milliseconds.
MAX_COMPILE_S = 2.0
MAX_START_S = 60.0
WATCHDOG_S = 30.0
# Of the process's address space, the interpreter and the tokenizer included.
MAX_BYTES = 4 * 2**30
MAX_REMEMBERED = 1024
# So that one bad grammar does not keep the good ones of others waiting for long.
NUM_PROCESSES = 2


class _Setup(msgspec.Struct, frozen=True):
    """The first line that a process reads."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: list[int]


class _Verdict(msgspec.Struct, frozen=True):
    """What it answers to every line; `error` is None where all is well."""

    error: str | None


class CheckerProcess:
    """A `GrammarChecker`, for any number of threads. Processes start when they are first needed.

    Args:
        tokenizer_json: And what follows, as for `GrammarCompiler`.
        max_compile_s: What takes longer is refused.
    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        max_compile_s: float = MAX_COMPILE_S,
    ) -> None:
        self._setup = _Setup(tokenizer_json, vocab_size, list(eos_token_ids))
        self._max_compile_s = max_compile_s
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(NUM_PROCESSES)
        self._idle: list[subprocess.Popen[bytes]] = []
        self._is_closed = False
        # Also when nobody closes it, and at the interpreter's end.
        self._end_idle = weakref.finalize(self, _end_all, self._idle)
        # Digest of a grammar, which may be long itself, the most recent one last -> why it
        # was refused, or None.
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    def is_remembered(self, params: StructuredOutputsParams) -> bool:
        """See `GrammarChecker`."""
        with self._lock:
            return _digest(msgspec.json.encode(params)) in self._verdicts

    def check(self, params: StructuredOutputsParams) -> None:
        """See `GrammarChecker`."""
        line = msgspec.json.encode(params)
        digest = _digest(line)
        with self._lock:
            is_known = digest in self._verdicts
            error = self._verdicts.get(digest)
        if not is_known:
            with self._slots:
                error = self._ask(line, params.kind)
            with self._lock:
                self._verdicts[digest] = error
                if len(self._verdicts) > MAX_REMEMBERED:
                    self._verdicts.popitem(last=False)
        if error is not None:
            raise InvalidRequestError(error, param="structured_outputs")

    def close(self) -> None:
        """Ends the processes that compute nothing, and the others when they have answered."""
        with self._lock:
            self._is_closed = True
            self._end_idle()

    def _ask(self, line: bytes, kind: str) -> str | None:
        """Why a grammar is refused, or None."""
        with self._lock:
            process = self._idle.pop() if self._idle else None
        if process is None or process.poll() is not None:
            process = self._start()
        reply = _exchange(process, line, self._max_compile_s)
        if reply is None:
            _end(process)
            return (
                f"structured_outputs.{kind} cannot be compiled within {self._max_compile_s:g} s "
                f"and {MAX_BYTES >> 30} GB; send a simpler one."
            )
        with self._lock:
            is_kept = not self._is_closed
            if is_kept:
                self._idle.append(process)
        if not is_kept:
            _end(process)
        return msgspec.json.decode(reply, type=_Verdict).error

    def _start(self) -> subprocess.Popen[bytes]:
        root = str(Path(paxkv.__file__).resolve().parents[1])
        search = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            [sys.executable, "-m", "paxkv.structured_output.checker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Signals to the server's group end it by the end of its input, not in the middle.
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": search},
        )
        reply = _exchange(process, msgspec.json.encode(self._setup), MAX_START_S)
        if reply is None:
            _end(process)
            raise PaxkvError("the process that compiles grammars did not start; see stderr.")
        return process


def _digest(line: bytes) -> bytes:
    return hashlib.sha256(line).digest()


def _exchange(process: subprocess.Popen[bytes], line: bytes, timeout_s: float) -> bytes | None:
    """The answer to a line; None when there is none in time, or the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(line + b"\n")
        process.stdin.flush()
    except BrokenPipeError:
        return None
    # An answer is written at once, so that what begins to come is there as a whole.
    readable, _, _ = select.select([process.stdout], [], [], timeout_s)
    return (process.stdout.readline() or None) if readable else None


def _end_all(processes: list[subprocess.Popen[bytes]]) -> None:
    while processes:
        _end(processes.pop())


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        pipe.close()


def serve(lines: BinaryIO, answers: BinaryIO, *, has_watchdog: bool = False) -> None:
    """What the process does: one answer a line, until there are no more lines.

    Args:
        has_watchdog: It ends by itself where one line takes far too long: whoever would have
            ended it may be gone.
    """
    setup = msgspec.json.decode(lines.readline(), type=_Setup)
    compiler = GrammarCompiler(
        setup.tokenizer_json, vocab_size=setup.vocab_size, eos_token_ids=setup.eos_token_ids
    )
    # Now, so that no grammar's time is spent on it.
    error = None
    try:
        compiler.check(StructuredOutputsParams(json_object=True))
    except InvalidRequestError as raised:
        error = str(raised)
    _answer(answers, error)
    while line := lines.readline():
        error = None
        if has_watchdog:
            # A thread of its own, which needs no interpreter.
            faulthandler.dump_traceback_later(WATCHDOG_S, exit=True)
        try:
            compiler.check(msgspec.json.decode(line, type=StructuredOutputsParams))
        except InvalidRequestError as raised:
            error = str(raised)
        if has_watchdog:
            faulthandler.cancel_dump_traceback_later()
        _answer(answers, error)


def _answer(answers: BinaryIO, error: str | None) -> None:
    answers.write(msgspec.json.encode(_Verdict(error)) + b"\n")
    answers.flush()


def _limit_memory() -> None:
    try:
        import resource  # noqa: PLC0415  Not everywhere: elsewhere the time limit has to do.
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))


if __name__ == "__main__":
    _limit_memory()
    serve(sys.stdin.buffer, sys.stdout.buffer, has_watchdog=True)
