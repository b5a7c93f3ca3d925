"""`choose_replica`: chooses the replica that computes a prompt."""

from collections.abc import Sequence

from paxkv.errors import EngineDeadError
from paxkv.fleet.replica import Replica

# A replica that knows the beginning of a prompt may have more requests than the least busy replica.
# Requests of the least busy replica -> limit: 0 -> 0, 1 -> 2, 2 -> 4, 8 -> 10, 12 -> 15.
_MAX_EXTRA_REQUESTS = 2
_REQUESTS_PER_EXTRA = 4


def choose_replica(replicas: Sequence[Replica], chain: Sequence[int]) -> Replica:
    """Chooses the replica for a prompt.

    An idle replica gets the next request. If none is idle, the request goes to the replica that
    knows the longest part of its prompt, among replicas that are not much busier than the least
    busy one. A stalled replica gets requests only if all reachable replicas are stalled.

    Args:
        chain: Result of `prompt_chain`, empty if the request reads no cached blocks.

    Raises:
        EngineDeadError: No replica is reachable.
    """
    reachable = [replica for replica in replicas if replica.is_reachable]
    if not reachable:
        raise EngineDeadError("all engines have ended.")
    candidates = [replica for replica in reachable if replica.transport.stall is None] or reachable
    fewest = min(len(replica.requests) for replica in candidates)
    # If a replica is idle, `most` is 0. Otherwise a system prompt that all requests share would
    # keep a light load on one replica, and the others would never cache it.
    most = fewest + max(min(_MAX_EXTRA_REQUESTS, fewest), fewest // _REQUESTS_PER_EXTRA)
    # Ties go to the first replica. So a client that sends one request at a time always reaches
    # the same prefix cache, also with prompts too short for a chain.
    return max(
        (replica for replica in candidates if len(replica.requests) <= most),
        key=lambda replica: (replica.prefixes.num_known(chain), -len(replica.requests)),
    )
