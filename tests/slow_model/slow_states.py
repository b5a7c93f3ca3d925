"""SlowStates: the slots of one group of states, in the plainest form."""

import dataclasses


@dataclasses.dataclass(eq=False)
class Saved:
    """A slot that is not written again.

    Args:
        key: The content under which its first block is cached; None if it is not cached yet.
        content: The key that the block will be cached under.
    """

    slot: list
    num_tokens: int
    is_rolling: bool
    req_id: str
    key: object = None
    content: object = None


def save_points(request, block_size, caching, interval=0):
    """Positions in the prompt at which the state is saved, and that of forks."""
    points = [request.num_prompt - 1] if request.keeps_state else []
    if caching:
        points += [(len(request.tokens) - 1) // block_size * block_size, request.save_at]
        points.append(request.num_leading // block_size * block_size)
        if interval:
            # Rounded up to whole blocks.
            points += range(0, len(request.tokens), -(-interval // block_size) * block_size)
    return points


def cut(request, computed, num_new, block_size, caching, interval, num_drafts=0):
    if num_drafts and caching:
        # If all of them are right, the request gets one more token. It passes no multiple.
        end = len(request.tokens)
        while any(m % block_size == 0 for m in range(end + 1, end + num_drafts + 1)):
            num_drafts -= 1
        num_new = min(num_new, end + num_drafts - computed)
    points = [p for p in save_points(request, block_size, caching, interval) if p > computed]
    return min([num_new, *(point - computed for point in points)])


class SlowStates:
    """Which slots hold which states. `own` is what each request writes.

    Args:
        max_blocks: Of all saved slots.
    """

    def __init__(self, pool, size, block_size, *, caching, max_blocks, interval=0):
        self.pool, self.size, self.block_size = pool, size, block_size
        self.caching, self.max_blocks = caching, max_blocks
        self.interval = interval
        # Set to false if another group of states has no room to save its own.
        self.can_save = True
        self.own, self.reads, self.unknown, self.forks = {}, {}, {}, {}
        # First block -> the latest slot that began with it.
        self.slots = {}
        # Saved states, the least recently used first.
        self.saved = []
        # Request id -> states that were saved while it decodes, oldest first. It holds their slots.
        self.rolling = {}
        self.switched = set()
        self.is_fresh = False
        # Of the slots in `reads`: states that requests hold after the step.
        self.rolling_reads = {}

    def current(self):
        """Saved states that a look-up finds."""
        return [s for s in self.saved if s.key is not None and self.pool.key_of(s.slot[0]) == s.key]

    def plan(self, request, first, computed, num_spare, key):
        """Decides whether a request takes an optional new slot; returns the blocks for it."""
        if request.request_id not in self.own:
            wants = first is not None and self.pool.refs[first] == 0
        else:
            wants = self.should_save(request, computed, key)
        size = self.cost_of_new(request.request_id)
        self.is_fresh = wants and num_spare >= size
        return size if self.is_fresh else 0

    def cost_of_new(self, req_id):
        """Free blocks for another slot; 0 if the request can reuse the slot of an older state."""
        return 0 if self.replaceable(req_id) else self.size

    def replaceable(self, req_id):
        """All rolling states of a request but its newest one."""
        return self.rolling.get(req_id, [])[:-1]

    def should_save(self, request, computed, key):
        if request.keeps_state and computed == request.num_prompt - 1:
            return True
        if not self.caching or computed == 0 or computed % self.block_size:
            return False
        if not self.can_save:
            return False
        points = save_points(request, self.block_size, True, self.interval)
        if computed < request.num_prompt and computed not in points:
            return False
        return computed >= request.num_prompt or self.pool.find(key) is None

    def take_hit(self, request, first):
        """A request starts from the slot that begins with a block."""
        slot = self.slots[first]
        saved = [s for s in self.current() if s.slot[0] == first]
        for state in saved:
            self.saved.remove(state)
            self.saved.append(state)
        if self.pool.refs[first] > 0 or self.is_fresh:
            self.pool.touch(slot)
            self.reads[request.request_id] = slot
            return
        for state in saved:
            self.drop(state)
        self.pool.take(slot)
        self.own[request.request_id] = slot

    def drop(self, state):
        self.saved.remove(state)
        self.pool.forget(state.slot[0])

    def allocate(self, request, computed, key):
        req_id = request.request_id
        if req_id in self.own and not self.is_fresh:
            return
        old = self.own.get(req_id)
        self.own[req_id] = self.new_slot(req_id)
        is_fork = request.keeps_state and computed == request.num_prompt - 1
        source = self.reads.get(req_id) if old is None else old
        if is_fork and source is not None:
            self.pool.touch(source)
            self.forks[req_id] = Saved(source, computed, False, req_id)
        if old is None:
            return
        self.switched.add(req_id)
        state = Saved(old, computed, computed >= request.num_prompt, req_id)
        if computed > len(request.tokens):
            self.unknown.setdefault(req_id, []).append(state)
            return
        self.reads[req_id] = old
        if self.caching and computed % self.block_size == 0:
            if state.is_rolling:
                state.content = key
                self.rolling_reads[req_id] = state
            else:
                self.save(state, key)

    def new_slot(self, req_id):
        """The slot of the request's oldest replaceable state, or else free blocks."""
        if self.replaceable(req_id):
            oldest = self.replaceable(req_id)[0]
            self.rolling[req_id].remove(oldest)
            return oldest.slot
        slot = self.pool.get_new(self.size)
        self.slots[slot[0]] = slot
        return slot

    def save(self, state, key):
        if self.pool.find(key) is not None:
            return
        state.key = key
        self.pool.cache(state.slot[0], key)
        self.saved = [s for s in self.saved if s.slot[0] != state.slot[0]] + [state]
        while len(self.saved) > self.max_blocks // self.size:
            oldest = self.saved[0]
            if oldest in self.current():
                self.pool.forget(oldest.slot[0])
            self.saved.remove(oldest)

    def switch(self, request, end):
        """Takes a new slot from the last multiple within a burst on; returns that position."""
        req_id = request.request_id
        multiples = range(0, end, self.block_size)
        position = multiples[-1] if len(multiples) else 0
        if position <= request.num_computed:
            return None
        old = self.own[req_id]
        self.own[req_id] = self.new_slot(req_id)
        self.unknown.setdefault(req_id, []).append(Saved(old, position, True, req_id))
        return position

    def learn(self, request, num_tokens, key_at):
        """The first tokens of a request are known now."""
        req_id = request.request_id
        while self.unknown.get(req_id) and self.unknown[req_id][0].num_tokens <= num_tokens:
            state = self.unknown[req_id].pop(0)
            state.content = key_at(state.num_tokens)
            self.rolling.setdefault(req_id, []).append(state)

    def finish_step(self):
        for req_id, slot in self.reads.items():
            if req_id in self.rolling_reads:
                self.rolling.setdefault(req_id, []).append(self.rolling_reads[req_id])
            else:
                self.pool.release_blocks(slot)
        self.reads, self.rolling_reads = {}, {}
        self.switched = set()

    def free(self, req_id):
        kept = [*self.rolling.get(req_id, [])]
        kept += [self.rolling_reads[req_id]] if req_id in self.rolling_reads else []
        for newest in kept[-1:]:
            self.save(newest, newest.content)
        slots = [self.own.pop(req_id)] if req_id in self.own else []
        slots += [state.slot for state in self.unknown.pop(req_id, [])]
        slots += [self.forks.pop(req_id).slot] if req_id in self.forks else []
        slots += [state.slot for state in self.rolling.pop(req_id, [])]
        slots += [self.reads.pop(req_id)] if req_id in self.reads else []
        for slot in slots:
            self.pool.release_blocks(slot)
        self.rolling_reads.pop(req_id, None)
        self.switched.discard(req_id)

    def free_spare(self):
        for req_id, states in self.rolling.items():
            state = states.pop(0)
            if not states:
                del self.rolling[req_id]
            self.save(state, state.content)
            self.pool.release_blocks(state.slot)
            return True
        if not self.forks:
            return False
        self.pool.release_blocks(self.forks.pop(next(iter(self.forks))).slot)
        return True

    def forked(self, source_id, num_tokens, num_computed, is_final):
        if is_final and num_tokens == num_computed:
            return self.own[source_id][:1]
        state = self.forks.get(source_id)
        return None if state is None or state.num_tokens != num_tokens else state.slot[:1]
