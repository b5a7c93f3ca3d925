"""Fills the field of a burst that says where its requests change their slots of states."""

from collections.abc import Mapping, Sequence

import numpy as np


def fill_slot_switches(
    switches_np: np.ndarray,  # i32[num_reqs], to be written
    positions_np: np.ndarray,  # i32[num_reqs], first position that each request computes
    req_ids: Sequence[str],
    slot_switches: Mapping[str, int],  # see `SchedulerOutput`
) -> None:
    """Fills in the position from which on each request writes its second slot."""
    switches_np[: len(positions_np)] = positions_np
    if slot_switches:
        places = [place for place, req_id in enumerate(req_ids) if req_id in slot_switches]
        switches_np[places] = [slot_switches[req_ids[place]] for place in places]
