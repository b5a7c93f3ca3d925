"""KVMemory: the content of each slot of the pool, so that a wrong read is detected.

A token's keys and values depend on all tokens before it and on its KV cache group. So a slot
holds (group, chain hash of the tokens up to its own), and a read states what it expects.
"""

from tests.slow_model.attention_kinds import first_visible, num_skipped_blocks


def chain(token_ids, scope):
    """Content of each position: equal if and only if all tokens up to it are equal."""
    contents = []
    # Only integers are hashed: hashes of strings differ from run to run.
    before = hash(tuple(str(scope).encode()))
    for token_id in token_ids:
        before = hash((before, token_id))
        contents.append(before)
    return contents


class KVMemory:
    """Slots by (block id, offset). A state fills all blocks of its table and is overwritten."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.slots = {}

    def zero(self, block_ids):
        self.slots = {slot: c for slot, c in self.slots.items() if slot[0] not in set(block_ids)}

    def copy(self, pairs):
        """Copies whole blocks, all at once: each source is read as it was before the call."""
        targets = [target for _, target in pairs]
        assert len(set(targets)) == len(targets), f"copies {pairs} have a target twice"
        before = dict(self.slots)
        self.zero(targets)
        for source, target in pairs:
            assert 0 not in (source, target), "a copy of the null block"
            for (block_id, offset), content in before.items():
                if block_id == source:
                    self.slots[target, offset] = content

    def slot(self, group, table, position):
        kind = self.kinds[group]
        return table[position // kind.block_size], position % kind.block_size

    def written_slots(self, group, table, position):
        """Slots that the token at `position` writes."""
        if self.kinds[group].name == "state":
            return [(block_id, 0) for block_id in table]
        return [self.slot(group, table, position)]

    def write(self, tables, contents, start, end, written, owner, *, num_drafts=0):
        """Writes positions `start` to `end` of one request.

        Args:
            num_drafts: The last positions, which states do not include.
            written: Slots written in this step or burst so far, and the owner of each. No two
                tokens may write one slot, but a request overwrites its own state.
        """
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name == "cross":
                continue
            mine = {}
            num_left_out = num_drafts if kind.name == "state" else 0
            for position in range(start, end - num_left_out):
                for slot in self.written_slots(group, table, position):
                    assert slot[0] != 0, "a write to the null block"
                    is_own_state = kind.name == "state" and written.get(slot) is owner
                    assert slot not in written or is_own_state, "two requests write one slot"
                    mine[slot] = owner
                    self.slots[slot] = (group, contents[position])
            written |= mine

    def load(self, tables, contents, start, end):
        """Fills positions as a connector does, except those no token reads: their block is null."""
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if not kind.holds_tokens:
                continue
            for position in range(start, end):
                slot = self.slot(group, table, position)
                if slot[0] == 0:
                    assert position // kind.block_size < num_skipped_blocks(kind, end)
                else:
                    self.slots[slot] = (group, contents[position])

    def read(self, tables, contents, start, end):
        """Reads all positions that the tokens `start` to `end` attend to, themselves included."""
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if not kind.holds_tokens:
                continue
            seen = {
                seen
                for position in range(start, end)
                for seen in range(first_visible(kind, position), position + 1)
            }
            for position in sorted(seen):
                slot = self.slot(group, table, position)
                found = self.slots.get(slot)
                assert found == (group, contents[position]), (
                    f"group {group}: {slot=} holds {found}, not what position {position} wrote"
                )

    def read_states(self, tables, contents, start):
        """Reads the state before `start`, before the step's own writes."""
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name != "state":
                continue
            assert len(table) == kind.size, f"group {group}: {table} is not a whole slot"
            for block_id in table if start > 0 else ():
                found = self.slots.get((block_id, 0))
                assert found == (group, contents[start - 1]), (
                    f"group {group}: block {block_id} holds {found}, not the state after {start} "
                    "tokens"
                )

    def holds(self, group, block_id, contents, block_idx):
        """Whether a block holds the part of `contents` that belongs in block `block_idx`."""
        kind = self.kinds[group]
        end = (block_idx + 1) * kind.block_size
        if kind.name == "state":
            return self.slots.get((block_id, 0)) == (group, contents[end - 1])
        return all(
            self.slots.get(self.slot(group, [block_id] * (block_idx + 1), position))
            == (group, contents[position])
            for position in range(end - kind.block_size, end)
        )
