"""A random workload with everything in it replays exactly, in a process without JAX."""

import subprocess
import sys
from pathlib import Path

import pytest

from paxkv.entrypoints.build_scheduler import make_scheduler, record_scheduler
from paxkv.trace.replayer import replay
from paxkv.trace.trace_file import TraceReader
from tests.end_to_end.random_workload import RandomWorkload, make_header

# Runs `python -m paxkv.replay` where JAX cannot be imported.
REPLAY_WITHOUT_JAX = """
import sys
sys.modules.update(dict.fromkeys(("jax", "jaxlib", "flax", "optax")))
from paxkv.replay import main
sys.exit(main(sys.argv[1:]))
"""


def record(file: Path, *, num_requests: int, seed: int, **header: object) -> int:
    """Runs a recorded workload; returns its number of steps."""

    def make(connector, grammar_gate):
        outside = {"connector": connector, "grammar_gate": grammar_gate}
        return record_scheduler(make_header(**header), file, **outside)

    workload = RandomWorkload(make, num_requests=num_requests, seed=seed)
    workload.run()
    return workload.num_steps


def test_requests_of_every_kind_replay_exactly_without_jax(tmp_path: Path) -> None:
    """The other process iterates over sets of strings in another order, too."""
    num_steps = record(tmp_path / "t", num_requests=200, seed=0)
    done = subprocess.run(
        [sys.executable, "-c", REPLAY_WITHOUT_JAX, str(tmp_path / "t")],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    first, drafts, last = done.stdout.splitlines()
    assert first.startswith(f"{num_steps} steps, 200 requests, ")
    assert " 0 preemptions" not in first and " 0 prompt tokens shared" not in first
    assert drafts.endswith(" accepted") and not drafts.endswith(" 0 accepted")
    assert last.startswith("exact: ")


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
def test_every_kind_of_scheduler_replays_exactly(
    tmp_path: Path, policy: str, is_async: bool
) -> None:
    record(tmp_path / "t", num_requests=100, seed=2, policy=policy, is_async=is_async)
    reader = TraceReader.open(tmp_path / "t")
    assert (reader.header.is_async, reader.header.has_connector) == (is_async, True)
    assert replay(reader, make_scheduler).difference is None
