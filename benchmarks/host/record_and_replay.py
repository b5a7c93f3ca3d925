"""Records a random workload of many requests and replays it in a process without JAX.

Prints how long both take and how long the trace is; fails unless the replay is exact.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.command_line import output_file, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from paxkv.scheduler.scheduler import Scheduler
from paxkv.scheduler.trace.recorder import TraceRecorder, make_scheduler, record_scheduler
from tests.end_to_end.random_outside import RandomConnector, RandomGrammarGate
from tests.end_to_end.random_workload import RandomWorkload, make_header

# Runs `python -m paxkv.replay` where JAX cannot be imported.
REPLAY_WITHOUT_JAX = """
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "optax")))
from paxkv.replay import main
sys.exit(main(sys.argv[1:]))
"""


def record(file: Path | None, num_requests: int, seed: int) -> tuple[float, int]:
    """Seconds and steps of the workload; without a file it runs unrecorded."""

    def make(connector: RandomConnector, gate: RandomGrammarGate) -> Scheduler | TraceRecorder:
        outside = {"connector": connector, "grammar_gate": gate}
        if file is None:
            return make_scheduler(make_header(), **outside)
        return record_scheduler(make_header(), file, **outside)

    workload = RandomWorkload(make, num_requests=num_requests, seed=seed)
    start_s = time.perf_counter()
    workload.run()
    return time.perf_counter() - start_s, workload.num_steps


def replay_without_jax(file: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`python -m paxkv.replay file` in a process where `import jax` fails."""
    return subprocess.run(
        [sys.executable, "-c", REPLAY_WITHOUT_JAX, str(file), *arguments],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.record_and_replay",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num-requests", type=positive_int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", type=output_file, help="keep the trace here")
    parser.add_argument(
        "--out", type=output_file, default=str(RESULTS_FOLDER / "record_and_replay.jsonl")
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = arguments.trace or Path(folder) / "trace.jsonl"
        unrecorded_s, num_steps = record(None, arguments.num_requests, arguments.seed)
        recorded_s, _ = record(file, arguments.num_requests, arguments.seed)
        start_s = time.perf_counter()
        replayed = replay_without_jax(file)
        replay_s = time.perf_counter() - start_s
        print(replayed.stdout + replayed.stderr, end="")
        trace_mb = file.stat().st_size / 1e6
    figures = {
        "unrecorded_s": unrecorded_s,
        "recorded_s": recorded_s,
        "replay_s": replay_s,
        "trace_mb": trace_mb,
    }
    for metric, value in figures.items():
        print(f"{metric:>14} {value:10.2f}")
    if replayed.returncode != 0:
        return replayed.returncode
    case = f"num_requests={arguments.num_requests} num_steps={num_steps} seed={arguments.seed}"
    rows = [
        ResultRow(
            benchmark="benchmarks.host.record_and_replay",
            case=case,
            metric=metric,
            values=[value],
            device=processor_name(),
        )
        for metric, value in figures.items()
    ]
    append_rows(rows, arguments.out)
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
