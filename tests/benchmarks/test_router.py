"""The simulated fleet: figures that can be computed without the simulation."""

import dataclasses
import json

import pytest

from benchmarks import router
from benchmarks.router import Workload, simulate

SMALL = Workload(num_replicas=4, num_requests=2000, rate_per_s=40, num_prefixes=12)


@pytest.mark.parametrize("policy", router.POLICIES)
def test_each_replica_computes_a_prefix_once_if_its_cache_holds_all(policy: str) -> None:
    # 12 prefixes of 32 chunks, and 2,000 tails of 8 chunks.
    workload = dataclasses.replace(SMALL, cache_tokens=16 * (12 * 32 + 2000 * 8))
    hit_percent = simulate(workload, policy)["hit_percent"]
    # At most 4 replicas x 12 prefixes are computed, and at least 12.
    assert 100 * (1 - 4 * 12 / 2000) <= hit_percent <= 100 * (1 - 12 / 2000)


def test_a_fleet_with_small_caches_hits_more_if_the_router_knows_the_prefixes() -> None:
    # A cache holds three of the twelve prefixes. The rate keeps all replicas busy.
    workload = dataclasses.replace(SMALL, rate_per_s=400, cache_tokens=16 * 3 * 40)
    by_prefix, by_load = (simulate(workload, policy) for policy in ("prefix", "least-busy"))
    assert by_prefix["hit_percent"] > by_load["hit_percent"] + 15
    assert by_prefix["imbalance"] < 1.5


def test_command_writes_a_row_per_figure(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    flags = ["--num-replicas", "3", "--num-requests", "1000", "--num-routers", "2"]
    assert router.main([*flags, "--policies", "prefix", "--out", str(out)]) == 0
    rows = {row["metric"]: row["median"] for row in map(json.loads, out.read_text().splitlines())}
    metrics = {"hit_percent", "imbalance", "slowest_ms", "decisions_per_cpu_s", "digests_per_cpu_s"}
    assert set(rows) == metrics
    assert all(value > 0 for value in rows.values())
