"""Measures how well the tests protect the engine: changes its lines and counts noticed changes.

A mutant is one small change of one line of `paxkv`: another operator, a constant that is one more
or less, a bound that is off by one, a deleted statement. The tests kill it if one of them fails. A
mutant that survives shows a line whose behaviour no test checks, or a change without any effect.

    python -m tests.mutants coverage --folder ../mutants
    python -m tests.mutants draw --folder ../mutants --seed 1 --list list.jsonl
    python -m tests.mutants run --folder ../mutants --list list.jsonl --results results.jsonl
    python -m tests.mutants report --list list.jsonl --results results.jsonl

1. `coverage` runs the tests once (without the tests of kernels and models) and stores in the folder
   which tests execute each line, and how long each test takes. Repeat it when the code changes.
2. `draw` draws 20 mutants in each of six areas: pool and managers, scheduler, runner, sampler,
   client, server. Equal trees and seeds give equal lists. A mutant is named by its function and its
   line, not by its file, so an old list can be run on a tree in which the code has moved.
3. `run` runs for each mutant the tests that execute its line, those of its package first and cheap
   ones before dear ones, until one fails or the limit is over (then it counts as survived, unless
   one test hangs). A test that kills is run once on the unchanged tree too, and does not count if
   it fails there; a slow one must fail on the mutant twice. The tree itself is not touched: each
   worker has a copy of it. Results are appended; called again, it goes on where it stopped. The
   same folder and list, with another results file, start afresh. The limit is wall time for a
   quiet machine: on a busy one, run again with a longer limit and `--more-time`.
4. `report` prints the counts per area, the survivors, and the mutants whose function or line is
   gone, as Markdown.

`--root` names another tree than the current folder; the environment must have what its tests need.
"""

import argparse
import signal
from pathlib import Path

from tests.mutants import draw
from tests.mutants.covered_lines import CoveredLines, measure
from tests.mutants.report import write_report
from tests.mutants.runs import read_results, run_mutants


def main() -> int:
    arguments = _parser().parse_args()
    return arguments.command(arguments) or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True)

    def add(name: str, command: object, *options: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name)
        sub.set_defaults(command=command)
        for option in options:
            default = Path() if option == "root" else None
            sub.add_argument(f"--{option}", type=Path, default=default, required=default is None)
        return sub

    sub = add("coverage", _coverage, "root", "folder")
    sub.add_argument("pytest_arguments", nargs="*", help="in place of -n 2 and all files; after --")
    sub = add("draw", _draw, "root", "folder", "list")
    sub.add_argument("--seed", type=int, default=1)
    sub.add_argument("--per-area", type=int, default=draw.MUTANTS_PER_AREA)
    sub = add("run", _run, "root", "folder", "list", "results")
    sub.add_argument("--workers", type=int, default=2, help="mutants side by side")
    sub.add_argument("--limit-s", type=float, default=60.0, help="seconds for one mutant")
    sub.add_argument(
        "--more-time",
        action="store_true",
        help="also run survivors again that had no time for all of their tests (with --limit-s)",
    )
    sub.add_argument("--nice", type=int, default=0, help="lowers the priority of the tests")
    add("report", _report, "list", "results")
    return parser


def _coverage(arguments: argparse.Namespace) -> int:
    return measure(
        arguments.root.resolve(),
        arguments.folder.resolve(),
        draw.TARGET_PACKAGES,
        arguments.pytest_arguments,
    )


def _draw(arguments: argparse.Namespace) -> None:
    covered = CoveredLines(arguments.folder)
    root = arguments.root.resolve()
    paths = {path for area in draw.AREAS for path in draw.files_of_area(root, area)}
    executed = {path: covered.executed_lines(path) for path in sorted(paths)}
    mutants = draw.draw(root, executed, arguments.seed, arguments.per_area)
    arguments.list.write_text("".join(f"{mutant.to_json()}\n" for mutant in mutants))


def _run(arguments: argparse.Namespace) -> None:
    # Copies of the tree are removed, also if the run is ended from outside.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_mutants(
            arguments.root.resolve(),
            arguments.folder.resolve(),
            _read_list(arguments.list),
            arguments.results,
            num_workers=arguments.workers,
            limit_s=arguments.limit_s,
            nice=arguments.nice,
            has_more_time=arguments.more_time,
        )
    except KeyboardInterrupt:
        print("stopped; call it again to go on", flush=True)


def _report(arguments: argparse.Namespace) -> None:
    print(write_report(_read_list(arguments.list), read_results(arguments.results)), end="")


def _read_list(file: Path) -> list[draw.Mutant]:
    return [draw.Mutant.from_json(line) for line in file.read_text().splitlines()]


if __name__ == "__main__":
    raise SystemExit(main())
