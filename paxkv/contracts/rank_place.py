"""`RankPlace`: the place of a process in the group of processes that compute for one engine."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank of a process in its group, and the addresses at which it meets the others.

    Args:
        rank: 0 is the leader, which has the scheduler. The others are followers.
        num_ranks: Number of processes, one per host.
        coordinator: HOST:PORT at which the leader's JAX listens.
        calls_endpoint: ZeroMQ endpoint at which the leader sends its calls.
        timeout_s: Longest time that a process waits for the others while it starts.
    """

    rank: int
    num_ranks: int
    coordinator: str
    calls_endpoint: str
    timeout_s: float
