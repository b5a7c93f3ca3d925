"""`paxkv`: one command with serve, generate, run-batch, chat and the other subcommands."""

import importlib
import sys
from collections.abc import Sequence

import paxkv
from paxkv.entrypoints.command_end import end_by_signals, run_command

# Subcommand -> module with a `main`, and its purpose. Modules are imported only when they are
# needed, because a chat needs no JAX, and help should be quick.
_COMMANDS = {
    "serve": ("paxkv.serve", "serve a model over an OpenAI-compatible HTTP API"),
    "generate": ("paxkv.entrypoints.cli.generate", "complete prompts without a server"),
    "run-batch": (
        "paxkv.entrypoints.cli.run_batch",
        "answer a file of requests without a server",
    ),
    "chat": ("paxkv.entrypoints.cli.chat", "talk to a running server"),
    "bench": ("paxkv.entrypoints.cli.bench", "run a benchmark, in a source checkout"),
    "compile": ("paxkv.compile", "compile an engine's programs before it starts"),
    "replay": ("paxkv.replay", "repeat the scheduling of a recorded trace, and compare"),
    "collect-env": (
        "paxkv.entrypoints.cli.collect_env",
        "print versions and devices, for a problem report",
    ),
}
_USAGE_ERROR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a subcommand; returns the exit code of the process."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return 0 if words else _USAGE_ERROR
    if name in ("-v", "--version"):
        print(paxkv.__version__)
        return 0
    if name not in _COMMANDS:
        print(f"paxkv: error: no command {name!r}.\n{_help()}", file=sys.stderr)
        return _USAGE_ERROR
    module, _ = _COMMANDS[name]
    end_by_signals()
    command = importlib.import_module(module).main
    return run_command(lambda: command(words[1:]))


def _help() -> str:
    lines = [f"  {name:<12} {purpose}" for name, (_, purpose) in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: paxkv COMMAND [...]",
            "",
            *lines,
            "",
            "paxkv COMMAND --help says more; paxkv --version prints the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
