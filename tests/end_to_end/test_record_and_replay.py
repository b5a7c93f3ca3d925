"""A random workload with everything in it replays exactly, in a process without JAX."""

from pathlib import Path

import pytest

from benchmarks.host.record_and_replay import record, replay_without_jax
from paxkv.scheduler.trace.recorder import record_scheduler
from paxkv.scheduler.trace.replayer import replay
from paxkv.scheduler.trace.trace_file import TraceReader
from tests.end_to_end.random_workload import RandomWorkload, make_header


def check_replay(file: Path, num_requests: int) -> None:
    _, num_steps = record(file, num_requests, seed=0)
    done = replay_without_jax(file)
    assert (done.returncode, done.stderr) == (0, "")
    first, last = done.stdout.splitlines()
    assert first.startswith(f"{num_steps} steps, {num_requests} requests, ")
    assert " 0 preemptions" not in first and " 0 prompt tokens shared" not in first
    assert last.startswith("exact: ")


def test_500_requests_replay_exactly_without_jax(tmp_path: Path) -> None:
    """The other process has another order of sets of strings, too."""
    check_replay(tmp_path / "t", 500)


@pytest.mark.slow
def test_10_000_requests_replay_exactly_without_jax(tmp_path: Path) -> None:
    check_replay(tmp_path / "t", 10_000)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("is_async", [False, True])
def test_every_kind_of_scheduler_replays_exactly(
    tmp_path: Path, policy: str, is_async: bool
) -> None:
    def make(connector, grammar_gate):
        header = make_header(policy=policy, is_async=is_async)
        outside = {"connector": connector, "grammar_gate": grammar_gate}
        return record_scheduler(header, tmp_path / "t", **outside)

    RandomWorkload(make, num_requests=100, seed=2).run()
    reader = TraceReader.open(tmp_path / "t")
    assert (reader.header.is_async, reader.header.has_connector) == (is_async, True)
    assert replay(reader).difference is None
