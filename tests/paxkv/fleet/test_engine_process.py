"""An engine in its own process: its messages, its start and its end."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq

from paxkv.contracts import wire
from paxkv.contracts.engine_output import EngineDead, EngineOutput, StepOutputs, UtilityReply
from paxkv.contracts.engine_request import AddRequest, Shutdown, UtilityCall
from paxkv.contracts.engine_start import EngineReady
from paxkv.errors import ConfigError, EngineDeadError
from paxkv.fleet import engine_process
from paxkv.fleet.engine_process import EngineProcess, describe_end
from paxkv.fleet.step_watch import StepWatch
from tests.killed_after import killed_after
from tests.paxkv.engine.fake_engine import make_request
from tests.paxkv.engine.fake_engine_process import COMMAND, fake_config
from tests.paxkv.engine.forked_engines import engines_forked_by, forking_process
from tests.paxkv.forked_processes import ForkedProcesses

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def forker() -> Iterator[ForkedProcesses]:
    with forking_process() as process:
        yield process


@pytest.fixture
def forked(forker: ForkedProcesses) -> Iterator[None]:
    """For tests that do not depend on the engine's command: forks engines instead of running it."""
    with engines_forked_by(forker):
        yield


@contextmanager
def starting(*, max_idle_start_s: float = 0.0, **settings: object) -> Iterator[EngineProcess]:
    process = EngineProcess(
        fake_config(**settings),
        show_progress=False,
        command=COMMAND,
        max_idle_start_s=max_idle_start_s,
    )
    try:
        yield process
    finally:
        process.end()
        process.release()


@contextmanager
def running(**settings: object) -> Iterator[EngineProcess]:
    with starting(**settings) as process:
        process.wait_until_ready()
        yield process


def receive(process: EngineProcess) -> EngineOutput:
    """The next message, without a loop."""
    assert process._outputs.poll(TIMEOUT_S * 1000), "no message came"
    return wire.decode_output(process._outputs.recv())


def receive_besides_steps(process: EngineProcess) -> EngineOutput:
    """The next message that is not a step. The last step only reports ended requests."""
    while isinstance(message := receive(process), StepOutputs):
        pass
    return message


def receive_until(process: EngineProcess, request_id: str) -> tuple[list[int], str]:
    """Tokens and finish reason of a request."""
    token_ids = []
    while True:
        message = receive(process)
        assert isinstance(message, StepOutputs), message
        for output in message.outputs:
            if output.request_id == request_id:
                token_ids += output.new_token_ids
                if output.finish_reason is not None:
                    return token_ids, output.finish_reason


def is_running(pid: int) -> bool:
    """Whether a process runs; False for a zombie."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pid: int) -> None:
    start = time.monotonic()
    while is_running(pid):
        assert time.monotonic() - start < TIMEOUT_S, f"process {pid} goes on"
        time.sleep(0.02)


def test_process_is_killed_if_the_order_cannot_be_sent(monkeypatch) -> None:
    pids = []

    def send_order(process: EngineProcess, order: object) -> None:
        pids.append(process.pid)
        raise OSError("no space left")

    monkeypatch.setattr(EngineProcess, "_send_order", send_order)
    with pytest.raises(OSError, match="no space left"):
        EngineProcess(fake_config(), show_progress=False, command=COMMAND)
    (pid,) = pids
    assert not is_running(pid)


def test_process_answers_requests_and_calls_and_ignores_terminal_signals() -> None:
    found = []
    with starting() as process:
        # Before the process has set its signal handlers.
        os.kill(process.pid, signal.SIGINT)
        folder = process._folder.path
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        ready = process.wait_until_ready(found.append)
        # From here on, no file remains, even if both processes are killed.
        assert not folder.exists()
        assert isinstance(ready, EngineReady)
        assert (ready.model_info.max_fitting_tokens, ready.stats.num_blocks) == (512, 65)
        assert found == [Path("/models/fake")]
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGTERM)
        process.send(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
        assert receive_until(process, "a") == ([5, 6, 5], "length")
        for call_id, method in enumerate(("check_invariants", "reset_prefix_cache", "nonsense")):
            process.send(UtilityCall(call_id=call_id, method=method))
        replies = [receive_besides_steps(process) for _ in range(3)]
        assert [type(reply) for reply in replies] == [UtilityReply] * 3
        assert [reply.result_json for reply in replies] == ["null", "true", None]
        process.send(Shutdown())
        assert receive_besides_steps(process) == EngineDead(reason="it was shut down")
        assert process.wait(TIMEOUT_S) == 0
    with pytest.raises(EngineDeadError):
        process.send(Shutdown())


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"mistake": "no such model"}, ConfigError, "^no such model$"),
        ({"bug": "out of memory"}, EngineDeadError, "RuntimeError: out of memory"),
        ({"exit_code": 7}, EngineDeadError, "exited with code 7"),
        ({"exit_code": -9}, EngineDeadError, "SIGKILL"),
    ],
)
def test_failed_start_has_a_reason_and_leaves_no_files(
    settings: dict[str, object], error: type[Exception], words: str, capfd: pytest.CaptureFixture
) -> None:
    with starting(**settings) as process:
        folder = process._folder.path
        with pytest.raises(error, match=words):
            process.wait_until_ready()
        assert process.wait(TIMEOUT_S) == settings.get("exit_code", 1)
    assert not folder.exists() and not is_running(process.pid)
    # Only an unexpected error prints a traceback.
    assert ("Traceback" in capfd.readouterr().err) == ("bug" in settings)


@pytest.mark.usefixtures("forked")
def test_engine_dead_arrives_before_a_failed_process_ends(capfd: pytest.CaptureFixture) -> None:
    with running(fails_at_step=1) as process:
        process.send(AddRequest(request=make_request("a", [5], max_tokens=9)))
        assert receive_besides_steps(process) == EngineDead(
            reason="RuntimeError: the device is on fire"
        )
        assert process.wait(TIMEOUT_S) == 0
    assert "Traceback" in capfd.readouterr().err


@pytest.mark.usefixtures("forked")
def test_end_kills_a_process_whose_step_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "CLOSE_TIMEOUT_S", 0.2)
    with running(step_s=3600) as process:
        process.send(AddRequest(request=make_request("a", [5])))
        start = time.monotonic()
        process.end()
        assert time.monotonic() - start < TIMEOUT_S
        assert not is_running(process.pid)


@pytest.mark.usefixtures("forked")
def test_end_kills_a_starting_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "CLOSE_TIMEOUT_S", TIMEOUT_S)
    with starting(start_s=3600) as process:
        process._connect_inputs(receive(process).input_endpoint)
        start = time.monotonic()
        process.end()
        assert time.monotonic() - start < TIMEOUT_S
        assert process.wait(0) == -signal.SIGKILL


def test_engine_without_an_order_ends_silently() -> None:
    ended = subprocess.run(
        COMMAND,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        input=b"",
        capture_output=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, b"", b"")


@pytest.mark.usefixtures("forked")
def test_idle_engine_sleeps() -> None:
    with running() as process:
        process.send(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
        assert receive_until(process, "a") == ([5, 6, 5], "length")
        start = time.monotonic()
        # An odd count means that the engine has work.
        while process.step_count % 2:
            assert time.monotonic() - start < TIMEOUT_S
            time.sleep(0.01)


# Prints the engine's process id, and whether it is ready.
_PARENT = """
import sys, time
from paxkv.fleet.engine_process import EngineProcess
from paxkv.contracts.engine_request import AddRequest
from tests.paxkv.engine.fake_engine import make_request
from tests.paxkv.engine.fake_engine_process import COMMAND, fake_config
process = EngineProcess(fake_config(step_s=3600), show_progress=False, command=COMMAND)
print(process.pid, process._folder.path, flush=True)
process.wait_until_ready()
process.send(AddRequest(request=make_request("a", [5])))
print("ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("is_ready", [False, True])
def test_engine_ends_when_its_parent_is_killed(is_ready: bool) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            with killed_after(TIMEOUT_S, parent):
                pid, folder = parent.stdout.readline().split()
                if is_ready:
                    assert parent.stdout.readline() == "ready\n"
        finally:
            parent.kill()
        wait_for_end(int(pid))
    # Also if the engine's interpreter was still starting.
    assert not Path(folder).exists()


@pytest.mark.usefixtures("forked")
def test_tcp_sockets_reject_clients_without_keys(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    endpoints = []
    connect = EngineProcess._connect_inputs
    monkeypatch.setattr(
        EngineProcess,
        "_connect_inputs",
        lambda process, endpoint: (endpoints.append(endpoint), connect(process, endpoint)),
    )
    with running() as process, zmq.Context() as context:
        assert endpoints[0].startswith("tcp://127.0.0.1:")
        stranger = context.socket(zmq.PUSH)
        stranger.linger = 0
        stranger.connect(endpoints[0])
        stranger.send(wire.encode(Shutdown()))
        time.sleep(0.2)
        process.send(AddRequest(request=make_request("a", [5, 6], max_tokens=3)))
        assert receive_until(process, "a") == ([5, 6, 5], "length")
        stranger.close()


def test_many_waiting_messages_do_not_block_the_loop(monkeypatch) -> None:
    process = EngineProcess.__new__(EngineProcess)
    waiting = list(range(200))

    def deliver_one() -> bool:
        time.sleep(0.001)
        return bool(waiting) and waiting.pop() >= 0

    async def run() -> int:
        process._loop = asyncio.get_running_loop()
        monkeypatch.setattr(process, "_deliver_one", deliver_one)
        process._loop.call_soon(process._deliver_waiting)
        num_turns = 0
        while waiting:
            await asyncio.sleep(0)
            num_turns += 1
        return num_turns

    # Messages take 200 ms, at most 20 ms per turn of the loop.
    assert asyncio.run(run()) >= 6


def test_exit_codes_are_described() -> None:
    assert "memory" in describe_end(-signal.SIGKILL)
    assert "SIGSEGV" in describe_end(-signal.SIGSEGV)
    assert "code 3" in describe_end(3)


@pytest.mark.usefixtures("forked")
def test_hanging_start_is_killed_with_a_traceback(capfd, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ""

    def wait_for_traceback(_: float) -> None:
        nonlocal said
        start = time.monotonic()
        while "fake_engine_process.py" not in said and time.monotonic() - start < TIMEOUT_S:
            time.sleep(0.01)
            said += capfd.readouterr().err

    # However busy the machine is, the engine prints before it is killed.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=wait_for_traceback)
    monkeypatch.setattr(engine_process, "time", clock)
    connect = EngineProcess._connect_inputs

    def connect_with_short_limit(process: EngineProcess, endpoint: str) -> None:
        connect(process, endpoint)
        # The engine has loaded its libraries, which may take long, so it can print a traceback.
        process._start_watch = StepWatch(0.5)

    monkeypatch.setattr(EngineProcess, "_connect_inputs", connect_with_short_limit)
    with starting(max_idle_start_s=600.0, start_s=3600) as process:
        with pytest.raises(EngineDeadError, match="nothing for 0.5 seconds.*engine-ready-timeout"):
            process.wait_until_ready()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    assert "fake_engine_process.py" in said


@pytest.mark.usefixtures("forked")
def test_computing_start_reports_progress() -> None:
    with starting(max_idle_start_s=600.0, work_s=3.5) as process:
        counts = set()
        is_too_long = process._start_watch.is_too_long

        def look(count: int, num_sent: int, now_s: float) -> bool:
            counts.add(count)
            return is_too_long(count, num_sent, now_s)

        process._start_watch.is_too_long = look
        assert isinstance(process.wait_until_ready(), EngineReady)
    # The engine counts when it has loaded its libraries, and then every second while it computes.
    # On a busy machine, one or two counts may be missing.
    assert len(counts) >= 3
