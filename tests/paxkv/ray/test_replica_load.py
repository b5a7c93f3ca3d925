"""How many replicas a load needs."""

import pytest

from paxkv.contracts.engine_output import SchedulerStats
from paxkv.ray.replica_load import needed_replicas, wanted_replicas


@pytest.mark.parametrize(
    ("running", "waiting", "compiling", "needed"),
    [
        (0, 0, 0, 0.0),
        (4, 0, 0, 0.5),
        (8, 0, 0, 1.0),
        (8, 8, 0, 2.0),
        # KV memory has room for two requests only.
        (2, 4, 0, 3.0),
        # A request whose grammar is compiled does not wait for a place.
        (2, 2, 2, 0.5),
        # The first step has not begun.
        (0, 4, 0, 0.5),
    ],
)
def test_waiting_requests_need_as_many_replicas_as_would_run_them(
    running: int, waiting: int, compiling: int, needed: float
) -> None:
    stats = SchedulerStats(
        num_running_reqs=running, num_waiting_reqs=waiting, num_compiling_reqs=compiling
    )
    assert needed_replicas(stats, max_num_seqs=8) == needed


def test_replicas_are_started_before_the_last_place_is_taken() -> None:
    needed = (0.0, 0.8, 0.81, 1.6, 3.0)
    assert [wanted_replicas(each) for each in needed] == [1, 1, 2, 2, 4]
