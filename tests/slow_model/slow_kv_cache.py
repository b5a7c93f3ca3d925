"""SlowKVCache: block tables of several groups in one pool; each call rebuilds whole tables."""

from tests.slow_model.attention_kinds import longest_hit, num_skipped_blocks
from tests.slow_model.slow_pool import SlowPool
from tests.slow_model.slow_states import SlowStates

NULL = SlowPool.NULL
NEW = ("new", None)


def blocks_for(num_tokens, block_size):
    return len(range(0, num_tokens, block_size))


def most_blocks_at_once(kind, num_tokens, num_new):
    """Most blocks that a request of `num_tokens` holds at once if a step computes `num_new`.

    The first token that a step reads may be anywhere in a block.
    """
    if kind.name == "state":
        return kind.size
    if kind.name not in ("window", "chunk"):
        return blocks_for(num_tokens, kind.block_size)
    num_before = kind.size - 1 if kind.name == "window" else kind.size
    num_held = min(num_before + num_new, num_tokens)
    return min(blocks_for(num_held, kind.block_size) + 1, blocks_for(num_tokens, kind.block_size))


class SlowKVCache:
    """Block tables per request and group. A request has `request_id`, `tokens`, `scope` (salt,
    adapter: whatever keeps equal tokens apart), `num_computed` and `skips_reading`.

    `copies` collects (source, target) of copy-on-write until the test takes them; all are made at
    once, before the step's writes.
    """

    def __init__(
        self,
        kinds,
        num_blocks,
        *,
        max_model_len,
        caching,
        use_eagle=False,
        state_share=1,
        state_interval=0,
    ):
        self.kinds = kinds
        self.pool = SlowPool(num_blocks)
        # Sinks belong to the layers: they are allocated first and are in no request's table.
        self.sinks = [
            self.pool.get_new(kind.size // kind.block_size) for kind in kinds if kind.name == "sink"
        ]
        self.max_model_len = max_model_len
        self.caching = caching
        num_state_groups = sum(kind.name == "state" for kind in kinds)
        self.states = {
            group: SlowStates(
                self.pool,
                kind.size,
                kind.block_size,
                caching=caching,
                max_blocks=int(num_blocks * state_share) // num_state_groups,
                interval=state_interval,
            )
            for group, kind in enumerate(kinds)
            if kind.name == "state"
        }
        for states in self.states.values():
            states.can_save = self.saves_states
        self.use_eagle = use_eagle
        self.tables = {}
        # Per request and group: number of leading blocks that were cached or hit.
        self.num_registered = {}
        # Per request: tokens already computed at admission, in hits or in a source's blocks.
        self.num_found = {}
        self.copies = []

    def key(self, request, group, block_idx):
        end = (block_idx + 1) * self.kinds[group].block_size
        return (group, request.scope, tuple(request.tokens[:end]))

    @property
    def saves_states(self):
        can_save = all(states.max_blocks >= states.size for states in self.states.values())
        return bool(self.states) and self.caching and can_save

    def key_at(self, request, group, num_tokens):
        """The content of the state after the first tokens of a request."""
        return (group, request.scope, tuple(request.tokens[:num_tokens]))

    def state_to_save(self, request, num_hit):
        """Length of the hit if states did not count; 0 if it is not longer."""
        if not self.saves_states or request.skips_reading:
            return 0
        kinds = [kind for kind in self.kinds if kind.holds_tokens]
        groups = [group for group, kind in enumerate(self.kinds) if kind.holds_tokens]
        if not kinds:
            return 0
        length = longest_hit(
            kinds,
            len(request.tokens) - 1,
            lambda i, block: self.pool.find(self.key(request, groups[i], block)) is not None,
            step=max(states.block_size for states in self.states.values()),
        )
        return length if length > num_hit else 0

    def get_computed(self, request):
        """Block ids per group of the longest hit, and its length; the last token is never hit."""
        nothing = [[] for _ in self.kinds]
        if not self.caching or request.skips_reading:
            return nothing, 0

        def found(group, block_idx):
            return self.pool.find(self.key(request, group, block_idx))

        length = longest_hit(
            self.kinds,
            len(request.tokens) - 1,
            lambda group, i: found(group, i) is not None,
            use_eagle=self.use_eagle,
        )
        blocks = []
        for group, kind in enumerate(self.kinds):
            left = num_skipped_blocks(kind, length)
            num = length // kind.block_size
            blocks.append([NULL if i < left else found(group, i) for i in range(num)])
        return blocks, length

    def forked(self, source_id, num_tokens, num_computed, *, is_final=False):
        """The source's blocks of its first `num_tokens` tokens; None if any is missing."""
        tables = self.tables.get(source_id)
        if tables is None or num_tokens > num_computed:
            return None
        blocks = []
        for group, (kind, table) in enumerate(zip(self.kinds, tables, strict=True)):
            if kind.name == "state":
                slot = self.states[group].forked(source_id, num_tokens, num_computed, is_final)
                if slot is None:
                    return None
                blocks.append(slot)
                continue
            if kind.name == "cross":
                blocks.append(list(table))
                continue
            part = table[: blocks_for(num_tokens, kind.block_size)]
            left = num_skipped_blocks(kind, num_tokens)
            if any(block_id == NULL for block_id in part[left:]):
                return None
            blocks.append([NULL] * left + part[left:])
        return blocks

    def planned_tables(self, request, computed, end, hits, encoder):
        """Each group's table after the allocation.

        An entry is a block id, or NEW, or ("copy", block id): a new block with a copy of that
        block's content, or ("replace", block id): a new block in place of that one.

        Args:
            computed: Tokens whose keys and values exist before the step.
            end: Tokens that must have a slot.
        """
        planned = []
        for group, kind in enumerate(self.kinds):
            old = (
                self.tables[request.request_id][group] if request.request_id in self.tables else []
            )
            if kind.name == "cross":
                # The encoder's tokens are all written at the start and never again.
                held = old or hits[group]
                planned.append(held + [NEW] * (blocks_for(encoder, kind.block_size) - len(held)))
                continue
            if kind.name == "state":
                planned.append(list(old) or [NEW] * kind.size)
                continue
            left = num_skipped_blocks(kind, computed)
            table = []
            for i in range(max(len(old), blocks_for(end, kind.block_size))):
                if i < left:
                    table.append(NULL)
                elif i < len(old):
                    table.append(old[i])
                elif i < len(hits[group]):
                    table.append(hits[group][i])
                else:
                    table.append(NEW)
            for i in range(computed // kind.block_size, blocks_for(end, kind.block_size)):
                block_id = table[i]
                if block_id not in (NEW, NULL) and self.is_shared(block_id, i < len(old)):
                    is_empty = i * kind.block_size >= computed
                    table[i] = ("replace" if is_empty else "copy", block_id)
            planned.append(table)
        return planned

    def is_shared(self, block_id, is_own):
        num_others = self.pool.refs[block_id] - (1 if is_own else 0)
        return num_others > 0 or self.pool.key_of(block_id) is not None

    def cost(self, table):
        """Free blocks that the table takes: new blocks, copies, and hits with no reference."""
        num_new = sum(isinstance(entry, tuple) for entry in table)
        named = {entry[1] if isinstance(entry, tuple) else entry for entry in table}
        return num_new + sum(self.pool.refs[block_id] == 0 for block_id in named - {None, NULL})

    def free_skipped(self, request, computed):
        """Frees the blocks that no later token reads: group by group, the newest first."""
        for kind, table in zip(self.kinds, self.tables.get(request.request_id, ()), strict=False):
            left = min(num_skipped_blocks(kind, computed), len(table))
            if not kind.holds_tokens:
                continue
            self.pool.release_blocks([table[i] for i in reversed(range(left))])
            for i in range(left):
                table[i] = NULL

    def allocate(
        self,
        request,
        num_new,
        *,
        num_hit=0,
        hits=None,
        lookahead=0,
        external=0,
        delay=False,
        encoder=0,
        must_fit=False,
    ):
        """True if there was room. If not, only the blocks that no later token reads are freed."""
        hits = hits or [[] for _ in self.kinds]
        computed = request.num_computed + num_hit + external
        end = min(computed + num_new + lookahead, self.max_model_len)
        self.free_skipped(request, computed)
        planned = self.planned_tables(request, computed, end, hits, encoder)
        if sum(map(self.cost, planned)) > len(self.pool.free):
            return False
        if must_fit and not self.whole_sequence_fits(request, computed, num_new, hits, encoder):
            return False
        num_spare = len(self.pool.free) - sum(map(self.cost, planned))
        for group, states in self.states.items():
            first = hits[group][-1] if hits[group] else None
            key = self.key_at(request, group, computed)
            num_spare -= states.plan(request, first, computed, num_spare, key)
        self.execute(request, planned, computed - external, hits, computed)
        if self.caching and not delay:
            self.register(request, min(computed + num_new, len(request.tokens)))
        return True

    def extend(self, requests, ends):
        """Gives each request new blocks up to its end; if they do not suffice, none gets any.

        Each request already has slots for one step.
        """
        missing = [
            [
                max(0, blocks_for(end, kind.block_size) - len(table)) if kind.holds_tokens else 0
                for kind, table in zip(self.kinds, self.tables[request.request_id], strict=True)
            ]
            for request, end in zip(requests, ends, strict=True)
        ]
        if sum(map(sum, missing)) > len(self.pool.free):
            return False
        for request, nums in zip(requests, missing, strict=True):
            for table, num in zip(self.tables[request.request_id], nums, strict=True):
                table += self.pool.get_new(num)
        return True

    def switch(self, request, end):
        """Saves a state in the middle of a burst; returns the position after it, or None."""
        num_blocks = sum(s.cost_of_new(request.request_id) for s in self.states.values())
        if not self.saves_states or num_blocks > len(self.pool.free):
            return None
        if any(request.request_id in states.switched for states in self.states.values()):
            return None
        positions = []
        for group, states in self.states.items():
            positions.append(states.switch(request, end))
            self.tables[request.request_id][group] = states.own[request.request_id]
        return positions[-1]

    def finish_step(self):
        for states in self.states.values():
            states.finish_step()

    def free_spare(self):
        return any([states.free_spare() for states in self.states.values()])

    def read_tables(self, req_id):
        """The tables, with the slots from which the step that is being decided reads."""
        tables = list(self.tables[req_id])
        for group, states in self.states.items():
            tables[group] = states.reads.get(req_id, tables[group])
        return tables

    def whole_sequence_fits(self, request, computed, num_new, hits, encoder):
        """Whether all known tokens could be computed, `num_new` in each step."""
        whole = min(max(computed + num_new, len(request.tokens)), self.max_model_len)
        planned = self.planned_tables(request, computed, whole, hits, encoder)
        num_needed = 0
        for kind, table in zip(self.kinds, planned, strict=True):
            most = most_blocks_at_once(kind, whole, max(num_new, 1))
            num_needed += self.cost(table) if kind.name == "cross" else min(self.cost(table), most)
        return num_needed <= len(self.pool.free)

    def execute(self, request, planned, num_found, hits, computed):
        """Allocates the blocks of `planned`.

        Args:
            num_found: Tokens whose keys and values were already in blocks: held, hit or forked.
        """
        is_first = request.request_id not in self.tables
        if is_first:
            self.tables[request.request_id] = [[] for _ in self.kinds]
            self.num_found[request.request_id] = num_found
            self.num_registered[request.request_id] = [
                num_found // kind.block_size if kind.holds_tokens else 0 for kind in self.kinds
            ]
        tables = self.tables[request.request_id]
        # The hits of all groups are taken first, so that no new block is one of them.
        for group, (old, table) in enumerate(zip(tables, planned, strict=True)):
            if group in self.states:
                if hits[group]:
                    self.states[group].take_hit(request, hits[group][-1])
                continue
            entries = [entry[1] if isinstance(entry, tuple) else entry for entry in table]
            self.pool.touch([entry for entry in entries[len(old) :] if entry is not None])
        for group, table in enumerate(planned):
            if group in self.states:
                key = self.key_at(request, group, computed)
                self.states[group].allocate(request, computed, key)
                tables[group] = self.states[group].own[request.request_id]
                continue
            dropped = []
            for i, entry in enumerate(table):
                if isinstance(entry, tuple):
                    (table[i],) = self.pool.get_new(1)
                    if entry[0] == "copy":
                        # The source may itself be the target of a pending copy.
                        source = {target: first for first, target in self.copies}
                        self.copies.append((source.get(entry[1], entry[1]), table[i]))
                    if entry != NEW:
                        dropped.append(entry[1])
            self.pool.release_blocks(dropped)
            tables[group] = table

    def register(self, request, num_tokens):
        """Caches the blocks that the first `num_tokens` tokens fill."""
        for group, kind in enumerate(self.kinds):
            if group in self.states:
                self.states[group].learn(
                    request,
                    num_tokens,
                    lambda end, group=group: self.key_at(request, group, end),
                )
            if not kind.holds_tokens:
                continue
            done = self.num_registered[request.request_id][group]
            num_full = num_tokens // kind.block_size
            for i in range(done, num_full):
                block_id = self.tables[request.request_id][group][i]
                if block_id != NULL:
                    self.pool.cache(block_id, self.key(request, group, i))
            self.num_registered[request.request_id][group] = max(done, num_full)

    def free(self, request):
        """Frees all blocks, the last first; blocks that were never computed leave the cache."""
        tables = self.tables.pop(request.request_id, None)
        if tables is None:
            return
        registered = self.num_registered.pop(request.request_id)
        num_there = max(request.num_computed, self.num_found.pop(request.request_id))
        for group, (kind, table, num) in enumerate(
            zip(self.kinds, tables, registered, strict=True)
        ):
            if group in self.states:
                self.states[group].free(request.request_id)
                continue
            for i in range(num_there // kind.block_size, num):
                self.pool.forget(table[i])
            self.pool.release_blocks(table[::-1])
        # A copy into a block without references is not needed.
        self.copies = [copy for copy in self.copies if self.pool.refs[copy[1]] > 0]
