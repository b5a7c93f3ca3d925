"""A test that hangs fails at its limit, and the processes that it waits for end."""

import asyncio
import signal
import subprocess
import threading

import pytest

from tests.killed_after import killed_after
from tests.time_limit import LIMIT_S, SLOW_LIMIT_S, limit_of, time_limit

LIMIT = "longer than its limit of 0.05 s"


def test_limit_ends_a_process_that_is_waited_for(monkeypatch, capsys):
    started = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *args, **kwargs: started.append(popen(*args, **kwargs)) or started[-1],
    )
    with pytest.raises(pytest.fail.Exception, match=LIMIT), time_limit(0.05):
        subprocess.run(["sleep", "1000"], check=True)
    assert started[0].returncode == -signal.SIGKILL
    assert "test_limit_ends_a_process_that_is_waited_for" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wait", [threading.Event().wait, lambda: asyncio.run(asyncio.sleep(1000))], ids=["lock", "loop"]
)
def test_limit_interrupts_locks_and_event_loops(wait):
    with pytest.raises(pytest.fail.Exception, match=LIMIT), time_limit(0.05):
        wait()


def test_limit_that_a_callback_swallows_is_raised_again():
    with pytest.raises(pytest.fail.Exception, match=LIMIT), time_limit(0.05, repeat_s=0.05):
        with pytest.raises(pytest.fail.Exception):
            threading.Event().wait()
        threading.Event().wait()


def test_every_phase_of_every_test_has_a_limit(request):
    remaining_s, repeat_s = signal.getitimer(signal.ITIMER_REAL)
    assert 0 < remaining_s <= LIMIT_S and repeat_s > 0
    assert limit_of(request.node) == LIMIT_S


@pytest.fixture
def remaining_s_of_setup():
    return signal.getitimer(signal.ITIMER_REAL)[0]


@pytest.mark.time_limit(20)
def test_mark_sets_the_limit_of_fixtures_too(request, remaining_s_of_setup):
    assert limit_of(request.node) == 20
    assert 0 < remaining_s_of_setup <= 20


def test_slow_tests_have_a_longer_limit(request):
    request.node.add_marker(pytest.mark.slow)
    assert limit_of(request.node) == SLOW_LIMIT_S


def test_output_of_a_silent_process_ends():
    with subprocess.Popen(["sleep", "1000"], stdout=subprocess.PIPE) as process:
        with killed_after(0.05, process):
            assert process.stdout.read() == b""
    assert process.returncode == -signal.SIGKILL
