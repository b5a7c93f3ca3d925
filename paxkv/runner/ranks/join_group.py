"""Joins the processes of one engine: JAX's devices, and the channel for calls."""

import jax

from paxkv.contracts.rank_place import RankPlace
from paxkv.errors import EngineDeadError
from paxkv.runner.ranks.rank_group import Follower, Leader

# JAX ends the group if a process is silent for this long. This is the last resort: usually the
# command that started a process notices its end, or host 0 notices a lost connection.
_HEARTBEAT_TIMEOUT_S = 60


def join_group(place: RankPlace) -> Leader | Follower:
    """Waits for all processes of the group. Must be called before JAX's first computation.

    Raises:
        EngineDeadError: A process did not join within `place.timeout_s`.
    """
    # The process that started this one handles signals, so JAX must not.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            place.coordinator,
            num_processes=place.num_ranks,
            process_id=place.rank,
            cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(place.timeout_s)),
            coordinator_bind_address=place.coordinator,
            heartbeat_timeout_seconds=_HEARTBEAT_TIMEOUT_S,
        )
    except RuntimeError as error:
        raise EngineDeadError(
            f"the processes of the engine did not meet at {place.coordinator} within "
            f"{place.timeout_s:g} seconds: {error}"
        ) from error
    return (Leader if place.rank == 0 else Follower)(place)


def is_in_group() -> bool:
    """Whether this process has joined a group."""
    return jax.distributed.is_initialized()
