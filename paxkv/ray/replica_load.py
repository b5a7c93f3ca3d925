"""How many replicas a load needs, by the requests that run and wait in each."""

import math

from paxkv.contracts.engine_output import SchedulerStats

# Name of the figure that replicas report to Ray Serve.
NEEDED_REPLICAS = "needed_replicas"
# Share of a replica's places that requests may take before another replica starts.
_FULL = 0.8


def needed_replicas(stats: SchedulerStats, max_num_seqs: int) -> float:
    """How many replicas are needed to run the requests of one replica without waiting.

    A replica has `max_num_seqs` places. While requests wait for KV memory, it has only as many
    places as requests run.
    """
    num_requests = stats.num_running_reqs + stats.num_waiting_reqs
    num_places = max_num_seqs
    if stats.num_waiting_reqs > stats.num_compiling_reqs and stats.num_running_reqs:
        num_places = min(max_num_seqs, stats.num_running_reqs)
    return num_requests / num_places


def wanted_replicas(needed: float) -> int:
    """The number of replicas for a load that needs `needed` full ones; at least 1."""
    return max(1, math.ceil(needed / _FULL))
