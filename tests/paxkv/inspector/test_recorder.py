"""Frames of an engine add up to its pool, and cost nothing while no client polls."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.contracts.observation import Inspection
from paxkv.errors import InvalidRequestError
from paxkv.inspector import recorder as recorder_module
from paxkv.inspector.recorder import InspectionRecorder
from paxkv.kv_cache.observers.block_changes import BlockChangeLog
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.scheduler import Scheduler
from tests.paxkv.inspector.inspected_pool import PageState, check_equals_the_pool, same_picture
from tests.paxkv.scheduler.stepping import FULL, FunctionRunner, add, make_scheduler, step, window


def ask(recorder, after_seq=-1, *, wants_snapshot=False, keeps_tokens=False):
    """The answer as the page receives it, after encoding and decoding as JSON."""
    answer = recorder.inspect(after_seq, wants_snapshot, keeps_tokens)
    return msgspec.json.decode(msgspec.json.encode(answer), type=Inspection)


OPERATIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(0, 2), st.integers(1, 40), st.integers(1, 12)),
    st.tuples(st.just("fork"), st.integers(0, 5)),
    st.tuples(st.just("abort"), st.integers(0, 5)),
    st.tuples(st.just("reset"), st.booleans()),
    st.tuples(st.just("step"), st.integers(1, 4)),
    st.tuples(st.just("look")),
)


class Traffic:
    """A small pool under random traffic: prefixes are shared, requests are preempted."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.runner = FunctionRunner()
        self.num_requests = 0

    def do(self, operation):
        match operation:
            case ("add", kind, num_tokens, max_tokens):
                prompt = [100 * kind + i for i in range(num_tokens)]
                self.add(prompt, max_tokens, keep_blocks=num_tokens % 5 == 0)
            case ("fork", index):
                if source := self.pick(index):
                    self.add(source.all_token_ids, 4, fork_from=source.request_id)
            case ("abort", index):
                if request := self.pick(index):
                    self.scheduler.finish_requests([request.request_id])
            case ("reset", is_forced):
                self.scheduler.reset_prefix_cache(is_forced)
            case ("step", num_steps):
                for _ in range(num_steps):
                    step(self.scheduler, self.runner)

    def add(self, prompt, max_tokens, **fields):
        self.num_requests += 1
        prompt = prompt[:50]
        with contextlib.suppress(InvalidRequestError):  # too long for this pool
            add(self.scheduler, f"r{self.num_requests}", prompt, max_tokens=max_tokens, **fields)

    def pick(self, index):
        requests = list(self.scheduler.requests.values())
        return requests[index % len(requests)] if requests else None


@given(
    operations=st.lists(OPERATIONS, min_size=5, max_size=40),
    specs=st.sampled_from([(FULL,), (FULL, window(8)), (window(12),)]),
    opens_at=st.integers(0, 10),
)
def test_first_snapshot_and_deltas_equal_the_pool(operations, specs, opens_at):
    scheduler = make_scheduler(Scheduler, num_blocks=24, specs=specs, max_num_seqs=4)
    recorder = InspectionRecorder(scheduler)
    traffic = Traffic(scheduler)
    for operation in operations[:opens_at]:
        traffic.do(operation)
    answer = ask(recorder)
    assert answer.delta is None
    page = PageState(answer.snapshot)
    check_equals_the_pool(page, scheduler)
    for operation in (*operations[opens_at:], ("look",)):
        traffic.do(operation)
        if operation[0] != "look":
            continue
        answer = ask(recorder, answer.seq, wants_snapshot=True)
        page.apply(answer.delta)
        check_equals_the_pool(page, scheduler)
        assert same_picture(page, PageState(answer.snapshot))


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_frames_show_a_preemption_and_its_freed_table(scheduler_class):
    scheduler = make_scheduler(scheduler_class, num_blocks=7, max_num_seqs=2)
    recorder, runner = InspectionRecorder(scheduler), FunctionRunner()
    for name in ("a", "b"):
        add(scheduler, name, 8, max_tokens=12)
    answer = ask(recorder)
    page = PageState(answer.snapshot)
    while not page.counters.num_preemptions:
        step(scheduler, runner)
        answer = ask(recorder, answer.seq)
        page.apply(answer.delta)
    assert [page.name(key) for key in page.running[::5]] == ["a"]
    assert page.name(page.waiting[0]) == "b" and page.waiting[3] == 1
    assert {name for name, _ in page.tables_by_name()} == {"a"}


def test_missed_answer_is_followed_by_a_snapshot():
    scheduler = make_scheduler()
    recorder = InspectionRecorder(scheduler)
    first = ask(recorder)
    add(scheduler, "a", 8)
    step(scheduler, FunctionRunner())
    lost = ask(recorder, first.seq)
    assert lost.snapshot is None
    answer = ask(recorder, first.seq)
    assert answer.delta is None
    check_equals_the_pool(PageState(answer.snapshot), scheduler)


def change_logs(pool):
    return [observer for observer in pool.observers if isinstance(observer, BlockChangeLog)]


def test_changes_are_recorded_only_while_a_client_polls(monkeypatch):
    scheduler = make_scheduler()
    pool = scheduler.kv_cache_manager.block_pool
    recorder = InspectionRecorder(scheduler)
    assert not recorder.is_active and change_logs(pool) == []
    now_s = 100.0
    monkeypatch.setattr(recorder_module.time, "monotonic", lambda: now_s)
    ask(recorder)
    now_s += recorder_module.LEASE_S
    recorder.on_step([], took_s=0.1, wait_s=0.05)
    assert recorder.is_active and len(change_logs(pool)) == 1
    now_s += 0.1
    recorder.on_step([], took_s=0.1, wait_s=0.05)
    assert not recorder.is_active and change_logs(pool) == []


def test_blocks_have_the_hits_and_parents_of_the_prefix():
    scheduler = make_scheduler()
    recorder, runner = InspectionRecorder(scheduler), FunctionRunner()
    prompt = list(range(12))
    add(scheduler, "before", prompt, max_tokens=1)
    step(scheduler, runner)
    answer = ask(recorder)
    page = PageState(answer.snapshot)
    assert all(row[3] == 0 for row in page.blocks.values())  # cached before anybody looked
    add(scheduler, "hit", prompt + [5, 6, 7, 8, 9], max_tokens=5)
    step(scheduler, runner)
    page.apply(ask(recorder, answer.seq).delta)
    chain = sorted((row for row in page.blocks.values() if row[3]), key=lambda row: row[3])
    assert [row[3] for row in chain] == [1, 2, 3, 4]
    assert [row[5] for row in chain] == [1, 1, 1, 0]
    assert [row[2] for row in chain] == [bytes(6), *(row[1] for row in chain[:-1])]


def test_block_details_have_tokens_only_if_requested():
    scheduler = make_scheduler()
    recorder, runner = InspectionRecorder(scheduler), FunctionRunner()
    ask(recorder, keeps_tokens=True)
    request = add(scheduler, "a", list(range(100, 106)), max_tokens=20)
    step(scheduler, runner)
    first, second = scheduler.kv_cache_manager.coordinator.get_blocks("a")[0]
    details = recorder.inspect_block(first.block_id, 0, True)
    assert (details.state, details.token_ids) == ("used", [100, 101, 102, 103])
    assert details.block_hash == request.block_hashes[0].hex()
    # A block that is not full is found in the table of its holder.
    assert recorder.inspect_block(second.block_id, 0, True).token_ids is None
    key = PageState(ask(recorder).snapshot).running[0]
    details = recorder.inspect_block(second.block_id, key, True)
    assert details.token_ids == request.all_token_ids[4:] and details.first_token_idx == 4
    assert recorder.inspect_block(first.block_id, key, False).token_ids is None
    scheduler.finish_requests(["a"])
    details = recorder.inspect_block(first.block_id, 0, True)
    assert (details.state, details.token_ids) == ("cached", [100, 101, 102, 103])
    assert recorder.inspect_block(0, 0, True).state == "null"
    with pytest.raises(InvalidRequestError, match="block_id=100"):
        recorder.inspect_block(100, 0, True)
    with pytest.raises(InvalidRequestError, match="no inspector page is open"):
        InspectionRecorder(scheduler).inspect_block(1, 0, True)


def test_reused_request_id_gets_a_new_key():
    scheduler = make_scheduler()
    recorder, runner = InspectionRecorder(scheduler), FunctionRunner()
    add(scheduler, "a", 8)
    step(scheduler, runner)
    answer = ask(recorder)
    page = PageState(answer.snapshot)
    first_key = page.running[0]
    scheduler.finish_requests(["a"])
    add(scheduler, "a", 12)
    step(scheduler, runner)
    page.apply(ask(recorder, answer.seq).delta)
    assert page.running[0] != first_key and list(page.requests) == [page.running[0]]
    check_equals_the_pool(page, scheduler)


def test_tokens_of_released_blocks_are_kept_only_with_keeps_tokens():
    scheduler = make_scheduler()
    recorder, runner = InspectionRecorder(scheduler), FunctionRunner()
    ask(recorder)
    add(scheduler, "a", list(range(100, 106)), max_tokens=20)
    step(scheduler, runner)
    first = scheduler.kv_cache_manager.coordinator.get_blocks("a")[0][0]
    scheduler.finish_requests(["a"])
    ask(recorder)
    details = recorder.inspect_block(first.block_id, 0, True)
    assert (details.state, details.first_token_idx, details.token_ids) == ("cached", 0, None)
    (log,) = change_logs(scheduler.kv_cache_manager.block_pool)
    assert not log.token_ids
