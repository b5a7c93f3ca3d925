"""The device knows the slots that rows read and write, and gets their blocks once."""

import numpy as np
import pytest

from paxkv.errors import InvariantError
from paxkv.runner.batch.block_table import BlockTable, MultiGroupBlockTable
from paxkv.runner.batch.slot_table import SlotTable
from paxkv.runner.shapes.program_shapes import TableShape


class Slots:
    """A table of 3 rows, and the blocks of slots as the device has them."""

    def __init__(self, blocks_per_state=2):
        table = TableShape(
            num_groups=1, max_blocks_per_req=blocks_per_state, block_size=8, is_state=True
        )
        shape = table.slot_shape(3)
        self.table = SlotTable(shape, max_num_seqs=3, num_blocks=10)
        self.blocks_np = np.zeros((shape.num_slots, blocks_per_state), np.int32)

    def write(self):
        """Writes the new slots as the device does; returns their number."""
        num_written = 0
        for packed_np in self.table.pack_new_slots():
            known_np = packed_np[packed_np[:, 0] < len(self.blocks_np)]
            self.blocks_np[known_np[:, 0]] = known_np[:, 1:]
            num_written += len(known_np)
        return num_written

    def of(self, row_idx):
        """What a row reads, and what it writes."""
        self.write()
        read_np, written_np = self.blocks_np[self.table.slots_np[:, row_idx]]
        return read_np.tolist(), written_np.tolist()


def test_new_slot_is_read_only_after_the_step_that_writes_it():
    slots = Slots()
    slots.table.append_row(1, [3, 4])
    assert slots.of(1) == ([3, 4], [3, 4])
    slots.table.finish_moves()
    slots.table.append_row(1, [5, 6])
    assert slots.of(1) == ([3, 4], [5, 6])
    slots.table.finish_moves()
    assert slots.of(1) == ([5, 6], [5, 6]) and slots.of(0) == ([0, 0], [0, 0])
    assert slots.table.num_blocks_np.tolist() == [0, 2, 0]


def test_slots_that_a_row_writes_in_turn_are_sent_once():
    slots = Slots()
    lists = [[3, 4], [5, 6], [7, 8]]
    for block_ids in lists:
        slots.table.append_row(1, block_ids)
        assert slots.write() == 1
    for block_ids in [*lists, *lists[::-1]]:
        slots.table.append_row(1, block_ids)
        assert slots.write() == 0 and slots.of(1)[1] == block_ids
    # Equal ids in another list are another slot, and are checked.
    with pytest.raises(InvariantError, match="block ids must be in"):
        slots.table.append_row(1, [3, 40])
    slots.table.clear_row(1)
    slots.table.append_row(1, [8, 9])
    assert slots.of(1) == ([8, 9], [8, 9])


def test_new_slot_never_replaces_the_one_that_the_row_reads():
    slots = Slots()
    lists = [[first, first + 1] for first in range(1, 9)]
    before = lists[0]
    for block_ids in [*lists, lists[0], *lists[3:6]]:
        slots.table.append_row(0, block_ids)
        assert slots.of(0) == (before, block_ids)
        slots.table.finish_moves()
        before = block_ids


def test_slots_of_many_rows_take_several_calls():
    table = TableShape(num_groups=2, max_blocks_per_req=1, block_size=8, is_state=True)
    slots = SlotTable(table.slot_shape(20), max_num_seqs=20, num_blocks=100)
    for row_idx in range(20):
        slots.append_row(row_idx, [1 + 2 * row_idx, 2 + 2 * row_idx])
    calls = slots.pack_new_slots()
    assert len(calls) == 2 and len({call_np.shape for call_np in calls}) == 1
    sent_np = np.concatenate(calls)
    sent_np = sent_np[sent_np[:, 0] < 61]
    assert sent_np[:, 0].tolist() == slots.slots_np[0].tolist() and (sent_np[:, 0] > 0).all()
    assert sent_np[:, 1:].ravel().tolist() == list(range(1, 41))
    assert slots.pack_new_slots() == []


def test_first_slot_may_come_with_one_to_read_from():
    slots = Slots()
    slots.table.append_row(0, [7, 8, 1, 2])
    assert slots.of(0) == ([7, 8], [1, 2])
    slots.table.clear_row(0)
    assert slots.of(0) == ([0, 0], [0, 0])


@pytest.mark.parametrize("block_ids", [[1], [1, 2, 3], [9, 10]])
def test_slot_that_is_not_whole_is_a_bug(block_ids):
    with pytest.raises(InvariantError):
        Slots().table.append_row(0, block_ids)


def test_rows_get_slots_of_one_block_together():
    slots = Slots(blocks_per_state=1)
    blocks = BlockTable(max_num_seqs=3, max_blocks_per_req=4, num_blocks=10)
    tables = MultiGroupBlockTable([blocks, slots.table])
    tables.append_rows([2, 0], [([1], [4]), ([2], [5])])
    tables.finish_moves()
    tables.append_rows([0, 2], [([], [7]), ([3], [])])
    assert slots.of(0) == ([5], [7]) and slots.of(2) == ([4], [4])
    tables.finish_moves()
    assert slots.of(0) == ([7], [7])
