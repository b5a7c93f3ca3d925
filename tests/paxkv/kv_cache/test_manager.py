"""KVCacheManager: hits, None without room, and memory that always reads back written tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paxkv.errors import InvariantError
from paxkv.kv_cache.manager import KVCacheBlocks
from paxkv.kv_cache.observers.event_recorder import KVEventRecorder
from tests.paxkv.kv_cache.cache_fakes import (
    BLOCK_SIZE,
    FakeRequest,
    admit,
    copies,
    count_slots_block_by_block,
    finish_step,
    fork,
    full,
    make_manager,
    run_alone,
    state,
    states,
    table,
    window,
)
from tests.slow_model.state_machine_settings import long, quick


def test_the_example_of_the_architecture_page():
    manager = make_manager(num_blocks=10)
    first = FakeRequest("first", [1, 2, 3, 4])
    assert admit(manager, first)
    finish_step(first)
    manager.free(first)

    request = FakeRequest("second", [1, 2, 3, 4, 5, 6])
    hits, num_hits = manager.get_computed_blocks(request)
    assert (hits.get_block_ids(), num_hits) == (([1],), 4)
    assert manager.block_pool.blocks[1].ref_cnt == 0
    new_blocks = manager.allocate_slots(request, 2, num_hits, hits)
    assert new_blocks.get_block_ids() == ([2],)
    assert manager.get_block_ids("second") == ([1, 2],)
    assert manager.usage == pytest.approx(2 / 9)
    assert manager.get_num_common_prefix_blocks("second") == [2]


def test_the_last_token_is_never_a_hit():
    manager = make_manager(num_blocks=10)
    first = FakeRequest("first", range(8))
    admit(manager, first)
    finish_step(first)
    assert manager.get_computed_blocks(FakeRequest("same", range(8)))[1] == 4
    assert manager.get_computed_blocks(FakeRequest("longer", range(9)))[1] == 8
    assert manager.get_computed_blocks(FakeRequest("shorter", range(4)))[1] == 0


def test_equal_prompts_in_one_step_share_blocks():
    manager = make_manager(num_blocks=10)
    first, second = FakeRequest("first", range(10)), FakeRequest("second", range(10))
    admit(manager, first)
    admit(manager, second)
    assert manager.get_block_ids("first") == ([1, 2, 3],)
    assert manager.get_block_ids("second") == ([1, 2, 4],)
    assert manager.count_slots([]) == (16, 16)
    finish_step(first)
    finish_step(second)
    # 4 blocks; the two tails of 4 slots hold tokens 8 and 9.
    assert manager.count_slots([first, second]) == (16, 12)


def test_only_blocks_of_known_tokens_are_cached():
    manager = make_manager(num_blocks=10)
    request = FakeRequest("r", range(7))
    # The 8th slot is for a draft, which may still be rejected.
    manager.allocate_slots(request, 8)
    assert manager.get_computed_blocks(FakeRequest("s", range(20)))[1] == 4


def test_lookahead_slots_end_at_max_model_len():
    manager = make_manager(num_blocks=10, max_model_len=12)
    request = FakeRequest("r", range(7))
    assert len(manager.allocate_slots(request, 7, num_lookahead_tokens=2).blocks[0]) == 3
    finish_step(request)
    request.all_token_ids += range(4)
    assert manager.allocate_slots(request, 4, num_lookahead_tokens=9).is_empty()


def test_delay_cache_blocks_leaves_caching_to_the_caller():
    manager = make_manager(num_blocks=10)
    request = FakeRequest("r", range(8))
    manager.allocate_slots(request, 8, delay_cache_blocks=True)
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0
    manager.cache_blocks(request, 8)
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 8


def test_allocate_slots_without_room_returns_none_and_changes_nothing():
    manager = make_manager(num_blocks=4)
    first = FakeRequest("first", range(8))
    admit(manager, first)
    finish_step(first)
    before = state(manager)
    assert not admit(manager, FakeRequest("other", range(50, 58)))
    assert not admit(manager, FakeRequest("hits two", range(20)))
    assert state(manager) == before
    assert admit(manager, FakeRequest("hits one", range(8)))


def test_free_hits_count_as_blocks_to_allocate():
    manager = make_manager(num_blocks=4)
    first = FakeRequest("first", range(8))
    admit(manager, first)
    finish_step(first)
    manager.free(first)
    # 3 blocks are free, 2 of them hits: 16 tokens need the hits and 2 more.
    before = state(manager)
    assert not admit(manager, FakeRequest("too long", range(16)))
    assert state(manager) == before
    assert admit(manager, FakeRequest("fits", range(12)))
    assert manager.get_block_ids("fits") == ([1, 2, 3],)


def test_blocks_that_were_not_computed_are_not_found_after_free():
    manager = make_manager(num_blocks=10)
    request = FakeRequest("r", range(12))
    admit(manager, request, num_new_tokens=6)
    finish_step(request, 6)
    manager.allocate_slots(request, 6)
    manager.free(request)  # preempted before the step ran: tokens 6..11 were never written
    assert manager.get_computed_blocks(FakeRequest("s", range(20)))[1] == 4
    manager.check_invariants()


def test_freed_tail_is_evicted_before_prefix():
    manager = make_manager(num_blocks=5)
    request = FakeRequest("r", range(16))
    admit(manager, request)
    finish_step(request)
    manager.free(request)
    admit(manager, FakeRequest("other", range(50, 57)))
    assert manager.get_computed_blocks(FakeRequest("s", range(20)))[1] == 8


def test_prompts_share_blocks_only_with_equal_salts():
    manager = make_manager(num_blocks=10)
    request = FakeRequest("r", range(8), salt="tenant")
    admit(manager, request)
    finish_step(request)
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0
    assert manager.get_computed_blocks(FakeRequest("s", range(9), salt="tenant"))[1] == 8


def test_a_request_that_skips_reading_still_fills_the_cache():
    manager = make_manager(num_blocks=10)
    for request_id in ("first", "second"):
        request = FakeRequest(request_id, range(9), skip_reading_prefix_cache=True)
        assert manager.get_computed_blocks(request)[1] == 0
        admit(manager, request)
        finish_step(request)
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 8
    assert manager.prefix_cache_stats.num_queries == 0


def test_stats_count_admissions_and_keep_resumed_requests_apart():
    manager = make_manager(num_blocks=5)
    first = FakeRequest("first", range(9))
    assert admit(manager, first)
    finish_step(first)
    waiting = FakeRequest("waiting", range(50, 60))
    for _ in range(3):
        assert not admit(manager, waiting)
    manager.free(first)
    first.num_preemptions = 1
    first.num_computed_tokens = 0
    assert admit(manager, first)
    stats = manager.prefix_cache_stats
    assert (stats.num_queries, stats.num_hits) == (9, 0)
    assert (stats.num_preempted_queries, stats.num_preempted_hits) == (9, 8)


def test_several_groups_work_without_prefix_caching():
    manager = make_manager(full(), full(), num_blocks=7, enable_caching=False)
    request = FakeRequest("r", range(9))
    assert manager.get_computed_blocks(request) == (KVCacheBlocks(((), ())), 0)
    assert admit(manager, request)
    assert manager.get_block_ids("r") == ([1, 2, 3], [4, 5, 6])
    finish_step(request)
    assert manager.count_slots([request]) == (24, 18)
    assert manager.allocate_slots(request, 4) is None
    manager.free(request)
    assert manager.get_block_ids("r") == ([], [])
    assert manager.usage == 0
    manager.check_invariants()


def test_reset_empties_the_cache_only_if_no_block_is_held():
    manager = make_manager(num_blocks=10)
    request = FakeRequest("r", range(8))
    admit(manager, request)
    finish_step(request)
    assert not manager.reset_prefix_cache()
    manager.free(request)
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 0


def test_scheduling_no_tokens_raises():
    with pytest.raises(InvariantError, match="num_new_tokens=0"):
        make_manager(num_blocks=10).allocate_slots(FakeRequest("r", range(3)), 0)


def test_check_invariants_detects_a_reference_without_a_table():
    manager = make_manager(num_blocks=10)
    admit(manager, FakeRequest("r", range(8)))
    manager.check_invariants()
    manager.block_pool.touch(manager.get_blocks("r").blocks[0][:1])
    with pytest.raises(InvariantError, match="is in 1 block tables"):
        manager.check_invariants()


def test_allocate_slots_with_all_five_kinds_of_tokens():
    manager = make_manager(full(), window(6), num_blocks=30)
    first = run_alone(manager, "first", range(8))
    assert manager.get_block_ids("first") == ([1, 2], [3, 4])
    # 8 hit tokens, 6 external, 5 computed now, 3 more slots: 22 positions, 6 blocks.
    request = FakeRequest("r", range(30))
    hits, num_hits = manager.get_computed_blocks(request)
    new_blocks = manager.allocate_slots(
        request, 5, num_hits, hits, num_lookahead_tokens=3, num_external_computed_tokens=6
    )
    # The token at 14 sees 9..14: the window's group never needs blocks 0 and 1.
    assert manager.get_block_ids("r") == ([1, 2, 5, 6, 7, 8], [0, 0, 9, 10, 11, 12])
    assert new_blocks.get_block_ids() == ([5, 6, 7, 8], [9, 10, 11, 12])
    # 19 tokens are known and computed: 4 blocks are full and cached.
    assert manager.get_computed_blocks(FakeRequest("s", range(30)))[1] == 16
    assert first.num_computed_tokens == 8
    manager.check_invariants()


def test_full_sequence_must_fit_needs_blocks_for_all_tokens():
    manager = make_manager(num_blocks=5)
    request = FakeRequest("r", range(20))
    before = state(manager)
    assert manager.allocate_slots(request, 4, full_sequence_must_fit=True) is None
    assert state(manager) == before
    # 17 tokens would need a fifth block; 16 fit. Without the setting, the first part must fit.
    assert not manager.allocate_slots(FakeRequest("t", range(17)), 4, full_sequence_must_fit=True)
    fits = FakeRequest("u", range(16))
    assert manager.allocate_slots(fits, 4, full_sequence_must_fit=True)
    assert len(table(manager, fits)) == 1
    assert manager.allocate_slots(request, 4) is not None


def test_full_sequence_must_fit_counts_free_hits():
    manager = make_manager(num_blocks=6)
    first = run_alone(manager, "first", range(8))
    request = FakeRequest("r", range(20))
    # 5 blocks, of which another request holds 2, which are hits: 3 are free.
    hits, num_hits = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 1, num_hits, hits, full_sequence_must_fit=True)
    manager.free(request)
    manager.free(first)
    longer = FakeRequest("longer", range(21))
    hits, num_hits = manager.get_computed_blocks(longer)
    # 6 blocks. The hits are free now and count too, so 5 free blocks are too few.
    assert not manager.allocate_slots(longer, 1, num_hits, hits, full_sequence_must_fit=True)


def test_a_request_with_loaded_blocks_is_counted_once():
    manager = make_manager()
    request = FakeRequest("r", range(9))
    hits, _ = manager.get_computed_blocks(request)
    manager.allocate_slots(
        request, 0, 0, hits, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    finish_step(request, 8)
    manager.allocate_slots(request, 1, 0, manager.empty_kv_cache_blocks)
    assert manager.prefix_cache_stats.num_queries == 9


def test_evicted_blocks_are_not_found_but_still_held():
    manager = make_manager()
    request = run_alone(manager, "r", range(9))
    manager.evict_blocks([2])
    assert manager.get_computed_blocks(FakeRequest("s", range(9)))[1] == 4
    assert table(manager, request) == [1, 2, 3]
    manager.check_invariants()


def test_the_miss_of_an_admission_is_explained():
    manager = make_manager()
    run_alone(manager, "first", range(9))
    request = FakeRequest("r", [*range(6), 50, 51, 52])
    assert manager.explain_miss(request).reason == "block_differs"
    admit(manager, request)
    # Its own blocks are cached now, but the answer is about the time of its admission.
    answer = manager.explain_miss(request)
    assert (answer.reason, answer.block_idx, answer.num_hit_tokens) == ("block_differs", 1, 4)


def test_events_are_recorded_if_there_is_a_recorder():
    recorder = KVEventRecorder([full()])
    manager = make_manager(observers=[recorder])
    run_alone(manager, "r", range(9))
    (event,) = recorder.drain()
    assert event.token_ids == list(range(8))
    assert recorder.drain() == []


@given(
    specs=st.sampled_from(
        [(full(),), (full(4), window(6, 8)), (window(5), window(9), window(5)), (full(), states())]
    ),
    enable_caching=st.booleans(),
    data=st.data(),
)
def test_slot_counts_are_right_and_skipped_calls_have_no_work(specs, enable_caching, data):
    manager = make_manager(*specs, num_blocks=60, enable_caching=enable_caching)
    requests = []
    for step in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["admit", "fork", "go on", "go on", "go on", "free"]))
        request = data.draw(st.sampled_from(requests)) if requests else None
        if action == "admit" or request is None:
            request = FakeRequest(f"r{step}", [0] * data.draw(st.integers(1, 20)))
            if admit(manager, request):
                finish_step(request)
                requests.append(request)
        elif action == "fork":
            num_shared = data.draw(st.integers(1, request.num_computed_tokens))
            if manager.get_forked_blocks(request, num_shared) is not None:
                forked = fork(manager, request, f"r{step}", num_shared)
                if forked is not None:
                    finish_step(forked)
                    requests.append(forked)
        elif action == "free":
            requests.remove(request)
            manager.free(request)
        else:
            num_new = data.draw(st.integers(1, 6))
            limit = manager.get_max_tokens_before_allocate(request)
            before = state(manager)
            request.all_token_ids += [1] * num_new
            if manager.allocate_slots(request, num_new) is None:
                del request.all_token_ids[-num_new:]
            else:
                if request.num_tokens <= limit:
                    assert state(manager) == before
                finish_step(request)
        copies(manager)
        manager.finish_step()
        manager.check_invariants()
        assert manager.count_slots(requests) == count_slots_block_by_block(manager, requests)


class ManagerMachine(RuleBasedStateMachine):
    """Compares the manager with a model of the memory: the content of each slot.

    A slot's content is the whole prefix up to its token, as a key's and value's really depend
    on all of it. `cached` names which blocks should be found, and by which prefix.
    """

    NUM_BLOCKS = 7
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=14)

    def __init__(self):
        super().__init__()
        self.manager = make_manager(num_blocks=self.NUM_BLOCKS, max_model_len=20)
        self.live = {}
        self.scheduled = {}  # request id -> tokens allocated and not yet written
        self.memory = {}
        self.cached = {}  # block id -> prefix
        self.num_requests = 0

    def table(self, request):
        return self.manager.get_block_ids(request.request_id)[0]

    def prefix(self, request, length):
        return (request.cache_salt, tuple(request.all_token_ids[:length]))

    def allocate(self, request, num_new_tokens, num_hits, hits):
        """Allocates and compares with the model; True if there was room."""
        old_table = self.table(request)
        held = {b for r in self.live.values() for b in self.table(r)}
        hit_ids = hits.get_block_ids()[0] if hits else []
        num_total = request.num_computed_tokens + num_hits + num_new_tokens
        num_blocks = -(-num_total // BLOCK_SIZE) - len(old_table) - len(hit_ids)
        num_needed = max(num_blocks, 0) + len(set(hit_ids) - held)
        has_room = num_needed <= self.NUM_BLOCKS - 1 - len(held)
        before = state(self.manager)
        blocks = self.manager.allocate_slots(request, num_new_tokens, num_hits, hits)
        assert (blocks is not None) == has_room
        if blocks is None:
            assert state(self.manager) == before
            return False
        (new_ids,) = blocks.get_block_ids()
        assert self.table(request) == old_table + hit_ids + new_ids
        assert not set(new_ids) & (held | set(hit_ids) | {0})
        for block_id in new_ids:
            self.cached.pop(block_id, None)
        request.num_computed_tokens += num_hits
        self.live[request.request_id] = request
        self.scheduled[request.request_id] = num_new_tokens
        for end in range(BLOCK_SIZE, min(num_total, request.num_tokens) + 1, BLOCK_SIZE):
            block_id = self.table(request)[end // BLOCK_SIZE - 1]
            self.cached[block_id] = self.prefix(request, end)
        return True

    @rule(token_ids=tokens, salt=st.sampled_from([None, None, "x"]), chunk=st.integers(1, 14))
    def admit(self, token_ids, salt, chunk):
        self.num_requests += 1
        request = FakeRequest(str(self.num_requests), token_ids, salt=salt)
        hits, num_hits = self.manager.get_computed_blocks(request)
        expected = 0
        while (
            expected + BLOCK_SIZE < request.num_tokens
            and self.prefix(request, expected + BLOCK_SIZE) in self.cached.values()
        ):
            expected += BLOCK_SIZE
        assert num_hits == expected
        self.allocate(request, min(chunk, request.num_tokens - num_hits), num_hits, hits)

    @precondition(lambda self: self.scheduled)
    @rule()
    def run_step(self):
        writes = []
        for request_id, num_tokens in self.scheduled.items():
            request = self.live[request_id]
            end = request.num_computed_tokens + num_tokens
            for i in range(request.num_computed_tokens, end):
                slot = (self.table(request)[i // BLOCK_SIZE], i % BLOCK_SIZE)
                self.memory[slot] = self.prefix(request, i + 1)
                writes.append(slot)
            request.num_computed_tokens = end
        assert len(set(writes)) == len(writes)
        self.scheduled = {}
        for request in self.live.values():
            for i in range(request.num_computed_tokens):
                slot = (self.table(request)[i // BLOCK_SIZE], i % BLOCK_SIZE)
                assert self.memory[slot] == self.prefix(request, i + 1)

    @precondition(lambda self: set(self.live) - set(self.scheduled))
    @rule(data=st.data(), token_id=st.integers(0, 1))
    def continue_request(self, data, token_id):
        request_id = data.draw(st.sampled_from(sorted(set(self.live) - set(self.scheduled))))
        request = self.live[request_id]
        if request.num_computed_tokens == request.num_tokens:
            if request.num_tokens == 20:
                return
            request.all_token_ids.append(token_id)
        self.allocate(request, request.num_tokens - request.num_computed_tokens, 0, None)

    @precondition(lambda self: set(self.live) - set(self.scheduled))
    @rule(data=st.data())
    def finish(self, data):
        request_id = data.draw(st.sampled_from(sorted(set(self.live) - set(self.scheduled))))
        self.manager.free(self.live.pop(request_id))

    @precondition(lambda self: self.scheduled)
    @rule(data=st.data())
    def preempt_before_the_step_runs(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.scheduled)))
        request = self.live[request_id]
        table = self.table(request)
        unwritten = table[request.num_computed_tokens // BLOCK_SIZE :]
        # A scheduler never does this to blocks that other requests have hit in the same step.
        if any(
            b in self.table(r) for r in self.live.values() if r is not request for b in unwritten
        ):
            return
        for block_id in unwritten:
            self.cached.pop(block_id, None)
        del self.scheduled[request_id]
        self.manager.free(self.live.pop(request_id))

    @rule()
    def reset(self):
        assert self.manager.reset_prefix_cache() == (not self.live)
        if not self.live:
            self.cached = {}

    @invariant()
    def manager_is_the_model(self):
        self.manager.check_invariants()
        hashed = {b.block_id for b in self.manager.block_pool.blocks if b.block_hash is not None}
        assert hashed == set(self.cached)


class TestManagerMachine(ManagerMachine.TestCase):
    settings = quick(50)


@pytest.mark.slow
class TestManagerMachineForLong(ManagerMachine.TestCase):
    settings = long(1500)
