"""ManagerMachine: runs the KV cache manager, SlowKVCache and a KVMemory on the same operations.

Requests are admitted, forked, continued, rejected and freed in the middle of a step. Each step
writes and reads the memory: a block in a table must hold what the request's tokens wrote.
"""

import dataclasses
import random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxkv.contracts.observation import AllBlocksCleared, BlockStored
from paxkv.kv_cache.hashing.block_hash import (
    BlockHasher,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
)
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources
from paxkv.kv_cache.manager import KVCacheManager
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from tests.slow_model import slow_states
from tests.slow_model.attention_kinds import num_skipped_blocks
from tests.slow_model.kv_memory import KVMemory, chain
from tests.slow_model.slow_kv_cache import SlowKVCache
from tests.slow_model.slow_request import SlowRequest
from tests.slow_model.specs import MAX_ENCODER_TOKENS, full, make_config

MAX_MODEL_LEN = 24


class RealRequest:
    """The part of a request that the manager reads; its values come from the SlowRequest."""

    def __init__(self, slow, hasher):
        self.slow = slow
        self.hasher = hasher
        self.sources = ExtraKeySources(cache_salt=slow.scope)
        self.request_id = slow.request_id
        self.block_hashes = []
        self.num_preemptions = 0
        self.lora_name = None
        self.cache_salt = slow.scope
        self.skip_reading_prefix_cache = slow.skips_reading
        self.hash()

    def hash(self):
        if self.hasher is not None:
            self.hasher.extend(self.block_hashes, self.slow.tokens, self.sources)

    @property
    def all_token_ids(self):
        return self.slow.tokens

    @property
    def num_tokens(self):
        return len(self.slow.tokens)

    @property
    def num_computed_tokens(self):
        return self.slow.num_computed

    @property
    def num_prompt_tokens(self):
        return self.slow.num_prompt

    @property
    def state_save_at(self):
        return self.slow.save_at

    @property
    def num_leading_tokens(self):
        return self.slow.num_leading

    @property
    def keeps_state_for_forks(self):
        return self.slow.keeps_state


@dataclasses.dataclass
class Pending:
    """What a request computes in the next step.

    Args:
        num_requests: Requests made so far. A later request may hit the blocks this one writes.
    """

    start: int
    end: int
    drafts: list
    num_requests: int


class ManagerMachine(RuleBasedStateMachine):
    """Rules and checks; `KINDS` lists the combinations of groups that an example may draw."""

    KINDS = ((full(2),),)
    CACHING = (True,)

    @initialize(
        data=st.data(),
        num_tokens=st.integers(12, 60),
        use_eagle=st.booleans(),
        hash_block_size=st.sampled_from([None, None, 1]),
        state_share=st.sampled_from([1, 1, 0.5, 0.3, 0]),
        state_interval=st.sampled_from([None, None, 1, 7]),
    )
    def start(self, data, num_tokens, use_eagle, hash_block_size, state_share, state_interval):
        self.kinds = data.draw(st.sampled_from(self.KINDS))
        # Block hashes do not cover the input of the encoder, so there is no caching with one.
        has_encoder = any(kind.name == "cross" for kind in self.kinds)
        self.has_states = any(kind.name == "state" for kind in self.kinds)
        self.caching = data.draw(st.sampled_from(self.CACHING))
        self.caching = self.caching and not has_encoder
        # No state is saved where such a hit would end.
        self.use_eagle = use_eagle and not self.has_states
        num_blocks = 1 + sum(
            3 * kind.size if kind.name == "state" else -(-num_tokens // kind.block_size)
            for kind in self.kinds
        )
        config = make_config(self.kinds, num_blocks, hash_block_size=hash_block_size)
        self.event_recorder = KVEventRecorder(
            [group.kv_cache_spec for group in config.kv_cache_groups]
        )
        self.real = KVCacheManager(
            kv_cache_config=config,
            max_model_len=MAX_MODEL_LEN,
            enable_caching=self.caching,
            use_eagle=self.use_eagle,
            state_cache_share=state_share,
            state_save_interval=state_interval,
            observers=[self.event_recorder],
        )
        self.hasher = None
        if self.caching:
            self.hasher = BlockHasher(block_size=config.resolved_hash_block_size, seed="test")
        self.slow = SlowKVCache(
            self.kinds,
            num_blocks,
            max_model_len=MAX_MODEL_LEN,
            caching=self.caching,
            use_eagle=self.use_eagle,
            state_share=state_share,
            state_interval=state_interval or 0,
        )
        self.memory = KVMemory(self.kinds)
        self.requests = {}
        self.real_requests = {}
        self.encoder_tokens = {}
        self.pending = {}
        self.loads = {}
        self.key_of_hash = {}
        self.known_outside = set()
        self.num_requests = 0

    # -- requests ---------------------------------------------------------------------------

    def make_request(self, draw):
        self.num_requests += 1
        start = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11][: draw.choice([0, 3, 4, 8, 11, 12])]
        tokens = start + [draw.randrange(2) for _ in range(draw.randint(1, 6))]
        return SlowRequest(
            request_id=f"r{self.num_requests}",
            tokens=tokens,
            num_prompt=len(tokens),
            scope=draw.choice([None, None, None, "tenant"]),
            max_tokens=MAX_MODEL_LEN,
            skips_reading=draw.random() < 0.1,
            keep_blocks=draw.random() < 0.3,
        )

    def keep(self, request, real, num_new, drafts):
        self.requests[request.request_id] = request
        self.real_requests[request.request_id] = real
        self.plan(request, num_new, drafts)

    def plan(self, request, num_new, drafts):
        computed = request.num_computed
        self.pending[request.request_id] = Pending(
            computed, computed + num_new, drafts, self.num_requests
        )

    def record_hashes(self, request, real):
        """Records which content each hash stands for, and checks that it never changes."""
        for group, kind in enumerate(self.kinds):
            if kind.name == "cross" or not self.caching:
                continue
            ratio = kind.block_size // self.hasher.block_size
            for i in range(len(request.tokens) // kind.block_size):
                block_hash = real.block_hashes[(i + 1) * ratio - 1]
                full_key = make_block_hash_with_group_id(block_hash, group)
                key = self.slow.key(request, group, i)
                assert self.key_of_hash.setdefault(full_key, key) == key

    @rule(seed=st.integers(0, 2**32), must_fit=st.booleans(), chunked=st.booleans())
    def admit(self, seed, must_fit, chunked):
        draw = random.Random(seed)
        request = self.make_request(draw)
        real = RealRequest(request, self.hasher)
        self.record_hashes(request, real)
        found, num_found = self.real.get_computed_blocks(real)
        hits, num_hit = self.slow.get_computed(request)
        assert num_found == num_hit
        if num_hit:
            assert list(found.get_block_ids()) == hits
        request.save_at = self.slow.state_to_save(request, num_hit)
        assert self.real.get_state_to_save(real, num_hit) == request.save_at
        external = 0 if self.has_states else draw.choice([0, 0, 0, draw.randint(0, 4)])
        external = min(external, len(request.tokens) - 1 - num_hit)
        num_new = len(request.tokens) - num_hit - external
        if chunked:
            num_new = draw.randint(1, num_new)
        num_new = self.cut(request, real, num_hit + external, num_new)
        self.allocate_new(request, real, found, hits, num_hit, num_new, external, must_fit, draw)

    @precondition(lambda self: self.requests)
    @rule(seed=st.integers(0, 2**32), must_fit=st.booleans())
    def fork(self, seed, must_fit):
        """Forks a request: the fork shares the source's blocks and copies a partly filled one.

        The source must have run: what a new request hit may be written only during the step,
        and copies are made before it.
        """
        draw = random.Random(seed)
        source = self.requests[draw.choice(sorted(self.requests))]
        if source.request_id in self.pending and not source.has_run:
            return
        self.num_requests += 1
        num_shared = draw.randint(1, len(source.tokens))
        if draw.random() < 0.5:
            num_shared = max(1, source.num_computed)
        if source.keeps_state and draw.random() < 0.5:
            num_shared = source.num_prompt - 1
        num_shared = min(num_shared, MAX_MODEL_LEN - 3)
        tokens = source.tokens[:num_shared] + [draw.randrange(2) for _ in range(2)]
        request = SlowRequest(
            request_id=f"r{self.num_requests}",
            tokens=tokens,
            num_prompt=len(tokens),
            scope=source.scope,
            max_tokens=MAX_MODEL_LEN,
            fork_from=source.request_id,
        )
        real = RealRequest(request, self.hasher)
        self.record_hashes(request, real)
        is_final = source.status == "finished"
        blocks = self.slow.forked(
            source.request_id, num_shared, source.num_computed, is_final=is_final
        )
        found = self.real.get_forked_blocks(
            self.real_requests[source.request_id], num_shared, is_final=is_final
        )
        assert (found is None) == (blocks is None), (num_shared, source, blocks)
        if blocks is None:
            return
        assert list(found.get_block_ids()) == blocks
        num_new = draw.randint(1, len(tokens) - num_shared)
        self.allocate_new(request, real, found, blocks, num_shared, num_new, 0, must_fit, draw)

    def allocate_new(self, request, real, found, hits, num_hit, num_new, external, must_fit, draw):
        encoder = 0
        if any(kind.name == "cross" for kind in self.kinds):
            encoder = draw.randint(1, MAX_ENCODER_TOKENS)
            encoder = self.encoder_tokens.get(request.fork_from, encoder)
        options = dict(encoder=encoder, must_fit=must_fit)
        expected = self.slow.allocate(
            request, num_new, num_hit=num_hit, hits=hits, external=external, **options
        )
        got = self.real.allocate_slots(
            real,
            num_new,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=found,
            num_external_computed_tokens=external,
            num_encoder_tokens=options["encoder"],
            full_sequence_must_fit=must_fit,
        )
        assert (got is not None) == expected
        if not expected:
            return
        request.num_computed = num_hit
        self.encoder_tokens[request.request_id] = encoder
        self.check_tables(request)
        request.num_computed += external
        self.loads[request.request_id] = (num_hit, num_hit + external)
        self.keep(request, real, num_new, [])

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100), num_new=st.integers(1, 9), num_drafts=st.integers(0, 2))
    def continue_one(self, which, num_new, num_drafts):
        idle = self.idle()
        if not idle:
            return
        req_id = idle[which % len(idle)]
        request, real = self.requests[req_id], self.real_requests[req_id]
        left = len(request.tokens) - request.num_computed
        num_new = min(num_new, left)
        drafts = []
        if num_new == left:
            room = MAX_MODEL_LEN - 1 - len(request.tokens)
            drafts = [0, 1][: min(num_drafts, max(room, 0))]
        num_new += len(drafts)
        num_new = min(num_new, MAX_MODEL_LEN - 1 - request.num_computed)
        num_new = self.cut(request, real, request.num_computed, num_new, len(drafts))
        if num_new < 1:
            return
        drafts = drafts[: max(0, request.num_computed + num_new - len(request.tokens))]
        limit = self.real.get_max_tokens_before_allocate(real)
        before = self.slow_state()
        expected = self.slow.allocate(request, num_new, lookahead=num_drafts)
        if request.num_computed + num_new + num_drafts <= limit:
            # The scheduler would not call `allocate_slots`.
            assert expected and self.slow_state() == before, "allocate_slots had work to do"
            self.plan(request, num_new, drafts)
            return
        got = self.real.allocate_slots(real, num_new, num_lookahead_tokens=num_drafts)
        assert (got is not None) == expected
        if expected:
            self.check_tables(request)
            self.plan(request, num_new, drafts)

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def end(self, which):
        """Ends a request whose blocks are kept for forks."""
        idle = self.idle()
        if idle:
            self.requests[idle[which % len(idle)]].status = "finished"

    def idle(self):
        """Requests that may continue."""
        unfinished = [r for r, request in self.requests.items() if request.status != "finished"]
        return sorted(set(unfinished) - set(self.pending))

    def cut(self, request, real, computed, num_new, num_drafts=0):
        """Number of new tokens up to the first position at which the state is saved."""
        cut = num_new
        for states in self.slow.states.values():
            cut = slow_states.cut(
                *(request, computed, cut),
                *(states.block_size, self.slow.saves_states, states.interval, num_drafts),
            )
        has_drafts = num_drafts > 0
        assert self.real.cut_at_save_point(real, computed, num_new, has_drafts=has_drafts) == cut
        return cut

    def slow_state(self):
        pool = self.slow.pool
        tables = {r: [list(t) for t in tables] for r, tables in self.slow.tables.items()}
        return list(pool.free), dict(pool.refs), list(pool.cached), tables, list(self.slow.copies)

    # -- a step -----------------------------------------------------------------------------

    def execute_copies(self):
        copies = [(c.source_block_id, c.target_block_id) for c in self.real.drain_block_copies()]
        assert copies == self.slow.copies
        self.slow.copies = []
        self.memory.copy(copies)

    def execute_loads(self):
        for req_id, (start, end) in self.loads.items():
            if req_id in self.requests:
                request = self.requests[req_id]
                contents = chain(request.tokens, request.scope)
                self.memory.load(self.slow.tables[req_id], contents, start, end)
        self.loads = {}

    @rule(seed=st.integers(0, 2**32))
    def execute(self, seed):
        draw = random.Random(seed)
        self.execute_copies()
        self.execute_loads()
        work = []
        for req_id, step in self.pending.items():
            request = self.requests[req_id]
            tokens = request.tokens + step.drafts
            reads = self.slow.read_tables(req_id)
            self.memory.read_states(reads, chain(tokens, request.scope), step.start)
            work.append((self.slow.tables[req_id], chain(tokens, request.scope), step))
        written = {}
        for tables, contents, step in work:
            self.memory.write(
                *(tables, contents, step.start, step.end, written, step),
                num_drafts=len(step.drafts),
            )
        for tables, contents, step in work:
            self.memory.read(tables, contents, step.start, step.end)
        self.real.finish_step()
        self.slow.finish_step()
        for req_id, step in self.pending.items():
            self.finish_step(req_id, step, draw)
        self.pending = {}
        self.check_contents()

    def finish_step(self, req_id, step, draw):
        request, real = self.requests[req_id], self.real_requests[req_id]
        num_accepted = draw.randint(0, len(step.drafts))
        request.has_run = True
        request.num_computed = step.end - len(step.drafts)
        if request.num_computed >= len(request.tokens):
            # With states, accepted drafts are computed again.
            request.num_computed += 0 if self.has_states else num_accepted
            request.tokens += step.drafts[:num_accepted]
            if len(request.tokens) < MAX_MODEL_LEN:
                request.tokens.append(draw.randrange(3))
            real.hash()
            self.record_hashes(request, real)

    # -- the end of requests ----------------------------------------------------------------

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 100))
    def free(self, which):
        """Frees a request, also one in the next step: then its tokens are never computed.

        Not if later requests may have hit its blocks (a scheduler preempts before it admits),
        nor if the request was admitted with tokens still to be loaded.
        """
        req_id = sorted(self.requests)[which % len(self.requests)]
        if req_id in self.loads:
            return
        if req_id in self.pending and self.pending[req_id].num_requests < self.num_requests:
            return
        self.free_request(req_id)

    def free_request(self, req_id):
        self.pending.pop(req_id, None)
        request = self.requests.pop(req_id)
        real = self.real_requests.pop(req_id)
        self.real.free(real)
        self.slow.free(request)

    @rule()
    def reset(self):
        num_permanent = sum(map(len, self.slow.sinks))
        assert self.real.reset_prefix_cache() == self.slow.pool.reset(num_permanent)

    # -- comparison -------------------------------------------------------------------------

    def check_tables(self, request):
        tables = self.real.get_block_ids(request.request_id)
        assert list(tables) == self.slow.tables[request.request_id]

    def check_contents(self):
        """Each cached block has been written and holds the content that its key names."""
        for (group, scope, tokens), block_id in self.slow.pool.cached:
            i = len(tokens) // self.kinds[group].block_size - 1
            assert self.memory.holds(group, block_id, chain(tokens, scope), i)

    @invariant()
    def is_the_same(self):
        if not hasattr(self, "real"):
            return
        self.real.check_invariants()
        pool, slow = self.real.block_pool, self.slow.pool
        assert [b.block_id for b in pool.free_block_queue.get_all_free_blocks()] == slow.free
        assert [block.ref_cnt for block in pool.blocks] == list(slow.refs.values())
        found = [
            (self.key_of_hash[key], block.block_id)
            for key, block in pool.cached_block_hash_to_block.items()
        ]
        assert sorted(found, key=repr) == sorted(slow.cached, key=repr)
        for request in self.requests.values():
            self.check_tables(request)
        self.check_events()

    def check_events(self):
        for event in self.event_recorder.drain():
            if isinstance(event, AllBlocksCleared):
                self.known_outside.clear()
                continue
            keys = {make_block_hash_with_group_id(h, event.group_id) for h in event.block_hashes}
            if not isinstance(event, BlockStored):
                self.known_outside -= keys
                continue
            self.known_outside |= keys
            last = self.key_of_hash[
                make_block_hash_with_group_id(event.block_hashes[-1], event.group_id)
            ]
            assert last[2][-len(event.token_ids) :] == tuple(event.token_ids)
        known = {self.key_of_hash[key] for key in self.known_outside}
        assert known == {key for key, _ in self.slow.pool.cached}
        assert all(get_block_hash(key) and get_group_id(key) >= 0 for key in self.known_outside)

    def teardown(self):
        if not hasattr(self, "real"):
            return
        self.execute(0)
        for req_id in sorted(self.requests):
            request = self.requests[req_id]
            for table, kind in zip(self.slow.tables[req_id], self.kinds, strict=True):
                if not kind.holds_tokens:
                    continue
                left = num_skipped_blocks(kind, request.num_computed)
                assert all(table[left : request.num_computed // kind.block_size])
            self.free_request(req_id)
        self.is_the_same()
        assert self.real.usage == 0
        assert self.real.reset_prefix_cache()
