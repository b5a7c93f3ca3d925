"""Fills the fields of a step that say which slots its states are in."""

from collections.abc import Mapping, Sequence

import numpy as np

from paxkv.runner.batch.block_table import SlotTable


def fill_slots(
    tables_np: np.ndarray,  # i32[2, num_groups, num_reqs, blocks_per_state], to be written
    places: Sequence[int] | slice,  # of the requests in `tables_np`
    table: SlotTable,
    rows: Sequence[int] | np.ndarray,  # of the same requests in `table`
) -> None:
    """Copies the slots that the requests read and the slots that they write."""
    _, num_groups, _, blocks_per_state = tables_np.shape
    for part_np, ids_np in zip(tables_np, (table.read_ids_np, table.block_ids_np), strict=True):
        slots_np = ids_np[rows].reshape(-1, num_groups, blocks_per_state)
        part_np[:, places] = slots_np.swapaxes(0, 1)


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
