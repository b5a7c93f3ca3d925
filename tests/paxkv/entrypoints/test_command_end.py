"""A command that is interrupted, or whose output is not read, ends without a traceback."""

import shutil
import signal
import subprocess
import sys

import pytest

from paxkv.entrypoints import command_end
from tests.killed_after import killed_after

LINE = "paxkv: interrupted.\n"


def run(program, **options):
    """Runs a program in a process, which may lose its stdout or end immediately."""
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        **options,
        timeout=120,
    )


def test_exit_code_is_that_of_main():
    assert command_end.run_command(lambda: 3) == 3
    assert command_end.run_command(lambda: None) == 0


def test_interrupt_prints_one_line(capsys):
    def main():
        raise KeyboardInterrupt

    assert command_end.run_command(main) == 130
    assert capsys.readouterr().err == LINE


@pytest.mark.parametrize("num_lines", [1, 10_000], ids=["at the end", "in the middle"])
def test_closed_stdout_ends_the_command_without_a_traceback(num_lines):
    program = (
        "import sys, time\n"
        "from paxkv.entrypoints.command_end import run_command\n"
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
    with killed_after(60, process):
        assert process.stderr.read() == ""
    process.stderr.close()
    assert process.wait(60) == 1


def test_another_broken_pipe_is_still_an_error(monkeypatch):
    def main():
        raise BrokenPipeError

    monkeypatch.setattr(command_end, "_is_stdout_closed", lambda: False)
    with pytest.raises(BrokenPipeError):
        command_end.run_command(main)


SWALLOWED = """
import os, signal
from paxkv.entrypoints.command_end import ended_by_interrupt
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


def test_interrupt_in_a_callback_ends_the_process():
    done = run(SWALLOWED.format(before=""))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n" + LINE)


def test_ignored_sigint_stays_ignored():
    done = run(SWALLOWED.format(before="signal.signal(signal.SIGINT, signal.SIG_IGN)"))
    assert (done.returncode, done.stdout) == (0, "went on\n"), done.stderr


def test_interrupt_handler_is_restored_afterwards():
    with command_end.ended_by_interrupt():
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


# A command that receives a signal when it imports the first module of another package.
IMPORTING = """
import os, runpy, signal, sys
pid = os.getpid()
{before}
class SignalsAtAnImport:
    @staticmethod
    def find_spec(name, *_):
        if name == "argparse":
            os.kill(pid, signal.{signal})
sys.meta_path.insert(0, SignalsAtAnImport)
sys.argv = ["paxkv", *{words}]
runpy.run_module("{module}", run_name="__main__", alter_sys=True)
"""
COMMANDS = {
    **{name: ("paxkv." + name, ["--help"]) for name in ("serve", "compile", "replay")},
    **{
        name: ("paxkv.entrypoints.cli." + name, ["--help"])
        for name in ("generate", "run_batch", "chat", "collect_env")
    },
    "paxkv serve": ("paxkv.entrypoints.cli.main", ["serve", "--help"]),
}
commands = pytest.mark.parametrize(("module", "words"), COMMANDS.values(), ids=COMMANDS)


@commands
def test_interrupt_during_the_imports_prints_one_line(module, words):
    done = run(IMPORTING.format(before="", signal="SIGINT", module=module, words=words))
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\n" + LINE)


@commands
def test_sigterm_ends_the_first_process_of_a_container_during_its_imports(module, words):
    before = "os.getpid = lambda: 1"
    done = run(IMPORTING.format(before=before, signal="SIGTERM", module=module, words=words))
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


def test_sigterm_ends_process_1_of_a_pid_namespace_during_its_imports():
    within = ["unshare", "--user", "--map-root-user", "--pid", "--fork", sys.executable, "-c"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*within, ""], check=False, timeout=120).returncode
    ):
        pytest.skip("this user may make no PID namespace")
    module, words = COMMANDS["serve"]
    program = IMPORTING.format(before="", signal="SIGTERM", module=module, words=words)
    done = subprocess.run(
        [*within, program], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout, done.stderr) == (143, "", "")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_ignored_signal_stays_ignored_during_the_imports(name):
    before = f"os.getpid = lambda: 1\nsignal.signal(signal.{name}, signal.SIG_IGN)"
    module, words = COMMANDS["replay"]
    done = run(IMPORTING.format(before=before, signal=name, module=module, words=words))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")


def test_interrupt_after_the_imports_is_handled_by_main():
    program = (
        "import signal, sys\n"
        "from paxkv.entrypoints.command_end import end_by_signals, run_command\n"
        "def main():\n"
        "    try:\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "    except KeyboardInterrupt:\n"
        "        return 7\n"
        "end_by_signals()\n"
        "sys.exit(run_command(main))"
    )
    assert run(program).returncode == 7
