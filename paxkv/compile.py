"""`python -m paxkv.compile`: compiles an engine's programs into a folder, for later starts."""

from paxkv.entrypoints.command_end import end_by_signals, ended_by_interrupt, run_command

# Before the imports below, which are slow.
if __name__ == "__main__":
    end_by_signals()

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from paxkv.config.command_line import add_config_flags
from paxkv.entrypoints.cli.arguments import add_serve_arguments, parse_arguments
from paxkv.entrypoints.cli.command_parser import CommandParser
from paxkv.entrypoints.engine_flags import ENGINE_CONFIG_CLASSES, engine_config_from_arguments
from paxkv.errors import ConfigError
from paxkv.fleet.replica_places import replica_environments
from paxkv.package_origin import check_package_origin

# Before the imports below: if another package is named `models`, their errors would not say so.
try:
    check_package_origin()
except ConfigError as error:
    raise SystemExit(f"paxkv: error: {error}") from None

from models.errors import ModelError
from paxkv.entrypoints.build import compile_programs

# Settings whose flags `--out` replaces.
_FOLDER_SETTINGS = ("enable_compilation_cache", "compilation_cache_dir", "compiled_dir")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles the programs; returns the exit code of the process."""
    namespace = parse_arguments(make_parser(), arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("paxkv").setLevel(logging.INFO)
    try:
        config = engine_config_from_arguments(namespace)
        # JAX reads these variables when it first uses a device. One replica's programs fit all.
        parallel = config.parallel
        sizes = parallel.data_parallel_size, parallel.tensor_parallel_size
        os.environ.update(replica_environments(*sizes)[0])
        with ended_by_interrupt():
            num_programs = compile_programs(config, namespace.out, show_progress=True)
    except (ConfigError, ModelError) as error:
        print("paxkv: error:", *str(error).splitlines(), file=sys.stderr)
        return 1
    print(f"{num_programs} programs are in {namespace.out}. Start the server with --compiled-dir.")
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Makes a parser with `--out` and the server's flags, except the HTTP flags."""
    parser = CommandParser(
        prog="paxkv compile",
        description="Compiles every program that a server with the same flags needs. Start the "
        "server with `--compiled-dir`; then it compiles nothing. The server refuses the folder if "
        "its device, versions, model or settings differ. Flags that do not affect programs have no "
        "effect here. Weights are not needed: `--load-format dummy` reads only config.json.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help="new or empty folder",
    )
    for config_class in ENGINE_CONFIG_CLASSES:
        add_config_flags(parser, config_class, without=_FOLDER_SETTINGS)
    add_serve_arguments(parser)
    return parser


if __name__ == "__main__":
    sys.exit(run_command(main))
