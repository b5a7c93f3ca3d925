"""A command that is stopped, or that nobody reads any more, ends with a line and no traceback."""

import signal
import subprocess
import sys

import pytest

from paxkv import command_end

LINE = "paxkv: interrupted.\n"


def run(program, **options):
    """A process of its own: it may lose its standard output, or end at once."""
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, **options
    )


def test_exit_code_is_that_of_main():
    assert command_end.run_command(lambda: 3) == 3
    assert command_end.run_command(lambda: None) == 0


def test_interrupt_is_a_line(capsys):
    def main():
        raise KeyboardInterrupt

    assert command_end.run_command(main) == 130
    assert capsys.readouterr().err == LINE


@pytest.mark.parametrize("num_lines", [1, 10_000], ids=["at the end", "in the middle"])
def test_reader_that_goes_away_is_no_traceback(num_lines):
    program = (
        "import sys, time\n"
        "from paxkv.command_end import run_command\n"
        "sys.stdin.readline()\n"
        f"sys.exit(run_command(lambda: print('line\\n' * {num_lines})))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait() == 1


def test_pipe_of_something_else_that_breaks_is_still_an_error(monkeypatch):
    def main():
        raise BrokenPipeError

    monkeypatch.setattr(command_end, "_is_stdout_closed", lambda: False)
    with pytest.raises(BrokenPipeError):
        command_end.run_command(main)


SWALLOWED = """
import os, signal
from paxkv.command_end import ended_by_interrupt
{before}
with ended_by_interrupt():
    try:
        os.kill(os.getpid(), signal.SIGINT)
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        pass
print("went on")
"""


def test_interrupt_that_would_be_swallowed_ends_the_process():
    done = run(SWALLOWED.format(before=""))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n" + LINE)


def test_ignored_interrupt_stays_ignored():
    done = run(SWALLOWED.format(before="signal.signal(signal.SIGINT, signal.SIG_IGN)"))
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_interrupt_means_the_same_again_afterwards():
    with command_end.ended_by_interrupt():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
