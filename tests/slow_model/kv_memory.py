"""KVMemory: what each slot of the pool holds, so that a wrong read is seen.

A token's keys and values depend on all tokens before it and on its KV cache group. So a slot
holds (group, the chain of tokens up to its own), and a read names what it expects to find.
"""

from tests.slow_model.attention_kinds import first_visible, num_blocks_left_behind


def chain(token_ids, scope):
    """Content of each position: equal exactly where everything up to there is equal."""
    contents = []
    # Of integers alone: those of strings differ from run to run.
    before = hash(tuple(str(scope).encode()))
    for token_id in token_ids:
        before = hash((before, token_id))
        contents.append(before)
    return contents


class KVMemory:
    """Slots by (block id, offset). A state is one slot per block, written over and over."""

    def __init__(self, kinds):
        self.kinds = kinds
        self.slots = {}

    def zero(self, block_ids):
        self.slots = {slot: c for slot, c in self.slots.items() if slot[0] not in set(block_ids)}

    def copy(self, pairs):
        """Copies whole blocks, all at once: each source is read as it was before."""
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
        block_id = table[position // kind.block_size]
        offset = 0 if kind.name == "mamba" else position % kind.block_size
        return block_id, offset

    def write(self, tables, contents, start, end, written):
        """Writes positions `start` to `end` of one request.

        Args:
            written: Slots written in this step so far; no two tokens may meet in one.
        """
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name == "cross":
                continue
            mine = set()
            for position in range(start, end):
                slot = self.slot(group, table, position)
                assert slot[0] != 0, "a write to the null block"
                assert slot not in written, "two requests write one slot"
                mine.add(slot)
                self.slots[slot] = (group, contents[position])
            written |= mine

    def load(self, tables, contents, start, end):
        """Fills positions from outside, but for those that no token reads: their block is null."""
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name == "cross":  # its blocks hold the encoder's tokens, which nothing loads
                continue
            for position in range(start, end):
                slot = self.slot(group, table, position)
                if slot[0] == 0:
                    assert position // kind.block_size < num_blocks_left_behind(kind, end)
                else:
                    self.slots[slot] = (group, contents[position])

    def read(self, tables, contents, start, end):
        """Reads all that the tokens `start` to `end` see, themselves included."""
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name in ("cross", "mamba"):
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
            if kind.name == "mamba" and start > 0:
                slot = self.slot(group, table, start - 1)
                found = self.slots.get(slot)
                assert found == (group, contents[start - 1]), (
                    f"group {group}: {slot=} holds {found}, not the state after {start} tokens"
                )

    def holds(self, group, block_id, contents, block_idx):
        """Whether a block holds what `contents` puts into block `block_idx` of a sequence."""
        kind = self.kinds[group]
        end = (block_idx + 1) * kind.block_size
        first = end - 1 if kind.name == "mamba" else end - kind.block_size
        return all(
            self.slots.get(self.slot(group, [block_id] * (block_idx + 1), position))
            == (group, contents[position])
            for position in range(first, end)
        )
