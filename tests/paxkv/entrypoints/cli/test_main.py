"""The command runs its subcommands, imports only the needed modules, and is installed."""

import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import paxkv
from paxkv.entrypoints.cli import main as cli

ROOT = Path(__file__).parents[4]
NAMES = ("serve", "generate", "run-batch", "chat", "bench", "compile", "replay", "collect-env")


def test_every_subcommand_exists_and_is_in_the_help(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in NAMES:
        assert f"  {name} " in text
        assert importlib.util.find_spec(cli._COMMANDS[name][0]) is not None
    assert tuple(cli._COMMANDS) == NAMES


def test_missing_or_unknown_subcommand_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert cli.main(["sreve"]) == 2
    assert "no command 'sreve'" in capsys.readouterr().err


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"{paxkv.__version__}\n"


def test_subcommand_gets_the_remaining_arguments_and_returns_its_exit_code(tmp_path, capsys):
    path = tmp_path / "no_trace.jsonl"
    path.write_text("nothing")
    assert cli.main(["replay", str(path)]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["chat", "--help"]])
def test_help_and_chat_import_neither_jax_nor_the_server(words):
    program = (
        "import sys\nfrom paxkv.entrypoints.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "sys.exit(bool({'jax', 'starlette', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_console_script_of_the_package_is_this_main():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["paxkv"].partition(":")
    assert (module, getattr(cli, function)) == ("paxkv.entrypoints.cli.main", cli.main)
