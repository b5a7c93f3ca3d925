"""RowDevice: computes packed steps on a memory that records the text of each slot."""

import itertools

import numpy as np

from paxkv.runner.sampling.sampled_tokens import NO_TOKEN, RESULT_WIDTH
from paxkv.runner.shapes.packed_layout import PackedLayout, table_field
from paxkv.runner.shapes.program_shapes import BurstShape

VOCAB_SIZE = 60
EMPTY_TEXT = 1
# In place of a window: a group of states.
STATE = "state"


def text_with(text, token_id):
    """Content of the slot of a token that follows a text."""
    return (text * 1_000_003 + token_id * 7919 + 12_345) % 2**61


def next_token(text):
    """The model. A text read from wrong slots is negative, so its next token is arbitrary."""
    return (text >> 7) % VOCAB_SIZE


class RowDevice:
    """Its inputs are the buffers of steps and of slots, and the last tokens of the previous step.

    Args:
        windows: Window of each KV cache group; None is full attention, STATE a group of states.
        block_sizes: Block size of each KV cache group.
        slot_shapes: `SlotShape` of each group of states.
    """

    def __init__(self, windows, *, block_sizes, max_num_seqs, slot_shapes):
        self.slot_blocks = [np.zeros(shape.dims, np.int32) for shape in slot_shapes]
        self.windows, self.block_sizes = windows, block_sizes
        # Per group: (block, offset) -> (text up to and including the token, text before it). Of a
        # group of states: block -> text.
        self.slots = [{} for _ in windows]
        self.prev_tokens_np = np.zeros(max_num_seqs, np.int32)
        self.garbage = itertools.count(1)

    def copy_blocks(self, copies):
        for window, slots, block_size in zip(
            self.windows, self.slots, self.block_sizes, strict=True
        ):
            if window == STATE:
                continue
            old = dict(slots)
            for copy in copies:
                for offset in range(block_size):
                    slots.pop((copy.target_block_id, offset), None)
                    found = old.get((copy.source_block_id, offset))
                    if found is not None:
                        slots[copy.target_block_id, offset] = found

    def write_slots(self, table_idx, packed_np):
        blocks_np = self.slot_blocks[table_idx]
        is_used_np = packed_np[:, 0] < len(blocks_np)
        indices_np, blocks_of_np = packed_np[is_used_np, 0], packed_np[is_used_np, 1:]
        blocks_np[indices_np] = blocks_of_np.reshape(-1, *blocks_np.shape[1:])

    def compute(self, built):
        """The results of a step, shaped like the device's; results of features are zeros."""
        fields = PackedLayout(built.shape).views(built.packed_np.copy())
        max_num_seqs = len(self.prev_tokens_np)
        source_np = fields["token_source"]
        on_device_np = self.prev_tokens_np[np.minimum(source_np, max_num_seqs - 1)]
        token_ids_np = np.where(source_np < max_num_seqs, on_device_np, fields["token_ids"])
        if isinstance(built.shape, BurstShape):
            return self._compute_burst(built.shape, fields, token_ids_np), {}
        return self._compute_step(built.shape, fields, token_ids_np)

    def _compute_step(self, shape, fields, token_ids_np):
        result_np = np.zeros((1, len(self.prev_tokens_np), RESULT_WIDTH), np.int32)
        starts_np = fields["query_start_loc"]
        for row in range(shape.num_reqs):
            for idx in range(starts_np[row], starts_np[row + 1]):
                position = int(fields["positions"][idx])
                first = int(fields["positions"][starts_np[row]])
                tables_np = self._tables_of(shape, fields, row, position - first)
                text = self._write(tables_np, position, int(token_ids_np[idx]))
                if fields["draw_position"][row] == position + 1:
                    result_np[0, row, 0] = next_token(text)
        self.prev_tokens_np = result_np[0, :, 0].copy()
        dims = {"num_tokens": shape.num_tokens, "num_reqs": shape.num_reqs}
        return result_np, {
            variant: {name: np.zeros(dim) for name, dim in variant.results(**dims).items()}
            for variant in shape.features
        }

    def _compute_burst(self, shape, fields, token_ids_np):
        result_np = np.full((shape.max_steps, shape.num_reqs, RESULT_WIDTH), NO_TOKEN, np.int32)
        for row in range(shape.num_reqs):
            for step_idx in range(min(fields["num_steps"][0], fields["num_tokens"][row])):
                position = int(fields["positions"][row]) + step_idx
                switch = int(fields["slot_switch"][row]) if "slot_switch" in fields else 0
                tables_np = self._tables_of(shape, fields, row, position - switch)
                text = self._write(tables_np, position, int(token_ids_np[row]))
                result_np[step_idx, row] = 0
                result_np[step_idx, row, 0] = token_ids_np[row] = next_token(text)
                is_ending = token_ids_np[row] in fields["ending_ids"][row]
                if is_ending and position + 1 >= fields["first_end"][row]:
                    break
        self.prev_tokens_np = np.zeros_like(self.prev_tokens_np)
        self.prev_tokens_np[: shape.num_reqs] = token_ids_np
        return result_np

    def _tables_of(self, shape, fields, row, num_since_switch):
        """The block table of each group; of a group of states, the slots to read and to write."""
        tables, slot_blocks = [], iter(self.slot_blocks)
        for idx, table in enumerate(shape.tables):
            array_np = fields[table_field(idx)]
            if table.is_state:
                blocks_np = next(slot_blocks)
                first, second = (tuple(blocks_np[slot].flat) for slot in array_np[:, row])
                tables.append(
                    (
                        second if num_since_switch > 0 else first,
                        first if num_since_switch < 0 else second,
                    )
                )
            else:
                tables += [group_np[row] for group_np in array_np]
        return tables

    def _write(self, tables_np, position, token_id):
        """Writes a token into each group; returns its text, which all groups must agree on."""
        texts = set()
        befores = []
        groups = list(zip(self.slots, tables_np, self.block_sizes, strict=True))
        for window, (slots, table_np, block_size) in zip(self.windows, groups, strict=True):
            if window == STATE:
                befores.append(None)
                texts.add(self._advance(slots, table_np[0], position, token_id))
                continue
            assert table_np[position // block_size] != 0, "written to the null block"
            before, is_right = self._read(slots, window, table_np, block_size, position)
            befores.append(before)
            texts.add(text_with(before, token_id) if is_right else -next(self.garbage))
        text = texts.pop() if len(texts) == 1 else -next(self.garbage)
        for before, window, (slots, table_np, block_size) in zip(
            befores, self.windows, groups, strict=True
        ):
            if window == STATE:
                assert 0 not in table_np[1], "written to the null block"
                slots.update(dict.fromkeys(table_np[1], text))
                continue
            slots[self._slot(table_np, block_size, position)] = (text, before)
        return text

    def _advance(self, slots, slot, position, token_id):
        """The text after a token, by the state before it; all blocks of a slot have the state."""
        before = {slots.get(block_id) for block_id in slot} if position > 0 else {EMPTY_TEXT}
        if len(before) > 1 or None in before:
            return -next(self.garbage)
        return text_with(before.pop(), token_id)

    def _read(self, slots, window, table_np, block_size, position):
        """Text before a position, and whether each slot it reads continues the slot before it."""
        if position == 0:
            return EMPTY_TEXT, True
        first = 0 if window is None else max(0, position - window + 1)
        seen = [slots.get(self._slot(table_np, block_size, idx)) for idx in range(first, position)]
        if not seen:  # a window of 1: a token reads only itself
            before = self._slot(table_np, block_size, position - 1)
            return slots.get(before, (EMPTY_TEXT,))[0], True
        if None in seen:
            return -next(self.garbage), False
        is_right = all(last[0] == this[1] for last, this in itertools.pairwise(seen))
        return seen[-1][0], is_right

    def _slot(self, table_np, block_size, position):
        return int(table_np[position // block_size]), position % block_size
