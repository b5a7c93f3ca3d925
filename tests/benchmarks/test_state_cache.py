"""The workloads share prefixes as documented; a larger share of memory finds more tokens."""

import json

import pytest

from benchmarks import state_cache
from benchmarks.state_cache import Workload, make_scheduler, measure

SLOTS = (2, 20)


def found(name, share, *, num_blocks=60_000):
    scheduler = make_scheduler(SLOTS, num_blocks, share, 4)
    return measure(Workload(name, 8, 0), scheduler, num_requests=40, at_once=4, seed=0)


def test_turns_continue_a_conversation_with_the_answer():
    workload = Workload("chat", 1, 0)
    first = workload.draw()
    workload._rng.random = lambda: 0.0
    workload.end(first, [1, 2, 3])
    second = workload.draw()
    num_before = len(first.prompt) + 3
    assert second.prompt[:num_before] == [*first.prompt, 1, 2, 3]
    assert len(second.prompt) > num_before
    assert second.num_leading_tokens == first.num_leading_tokens > 0


@pytest.mark.parametrize("name", ["chat", "prefix"])
def test_without_a_share_nothing_is_found(name):
    assert found(name, 0.0) == 0.0 < found(name, 0.5)


def test_command_writes_a_row_per_share(tmp_path):
    out = tmp_path / "rows.jsonl"
    flags = ["--workloads", "both", "--shares", "0", "0.5", "--num-requests", "12", "--seeds", "3"]
    flags += ["--at-once", "2", "--num-open", "4", "--slots", "1x2", "--num-blocks", "4000"]
    assert state_cache.main([*flags, "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["metric"] for row in rows] == ["found_percent"] * 2
    assert rows[0]["median"] == 0.0
