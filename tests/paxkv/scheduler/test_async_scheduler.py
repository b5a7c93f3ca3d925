"""A step may be scheduled before the previous step has returned; the tokens are the same."""

import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.errors import InvariantError
from paxkv.scheduler.async_scheduler import AsyncScheduler
from paxkv.scheduler.request import RequestStatus
from tests.paxkv.scheduler.stepping import (
    FunctionRunner,
    add,
    answer,
    check_progress,
    continuation,
    counts,
    make_scheduler,
    window,
)


class LateExecutor:
    """Executes each step immediately, and returns its tokens to the scheduler later."""

    def __init__(self, scheduler, *, depth, knows_ends=True):
        self.scheduler = scheduler
        self.runner = FunctionRunner(knows_ends=knows_ends)
        self.depth = depth
        self.in_flight = deque()
        self.outputs = {}

    def step(self, max_decode_steps=1, drafts=None):
        """Schedules one step, and returns old steps until `depth - 1` are in flight."""
        output = self.scheduler.schedule(max_decode_steps)
        self.scheduler.check_invariants()
        check_progress(self.scheduler, output)
        self.in_flight.append((output, self.runner.execute(output, drafts=drafts)))
        while len(self.in_flight) >= self.depth:
            self.return_oldest_step()
        return output

    def return_oldest_step(self):
        for result in self.scheduler.update_from_output(*self.in_flight.popleft()):
            self.outputs.setdefault(result.request_id, []).extend(result.new_token_ids)
        self.scheduler.check_invariants()

    def run(self, max_num_steps=500, max_decode_steps=1):
        for _ in range(max_num_steps):
            if not self.scheduler.has_unfinished_requests():
                break
            self.step(max_decode_steps)
        while self.in_flight:
            self.return_oldest_step()


def test_placeholders_count_tokens_of_steps_in_flight():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    assert counts(executor.step()) == {"a": 5}
    assert (request.num_computed_tokens, request.num_output_placeholders) == (5, 1)
    output = executor.step()
    assert counts(output) == {"a": 1}
    assert output.scheduled_cached_reqs.num_computed_tokens == [5]
    # The device has the token, but the scheduler does not know it.
    assert output.scheduled_cached_reqs.num_output_tokens == [1]
    assert (request.num_tokens, request.num_output_placeholders) == (5, 2)
    executor.return_oldest_step()
    assert (request.num_tokens, request.num_output_placeholders) == (6, 1)
    assert request.all_token_ids[5:] == continuation(range(5), 1)


def test_a_partial_prompt_has_no_placeholder():
    scheduler = make_scheduler(AsyncScheduler, max_num_batched_tokens=4)
    request = add(scheduler, "a", 9)
    executor = LateExecutor(scheduler, depth=4)
    assert [counts(executor.step()) for _ in range(3)] == [{"a": 4}, {"a": 4}, {"a": 1}]
    assert request.num_output_placeholders == 1


def test_a_block_is_not_cached_before_its_last_token_is_computed():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(7))
    LateExecutor(scheduler, depth=1).step()
    assert (request.num_tokens, request.num_computed_tokens) == (8, 7)
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    assert [block.block_hash is not None for block in blocks] == [True, False]


def test_a_block_is_cached_when_its_last_token_is_known():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(7))
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    executor.step()  # computes position 7, which fills block 1
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    assert request.num_computed_tokens == 8
    assert [block.block_hash is not None for block in blocks] == [True, False]
    executor.return_oldest_step()
    assert [block.block_hash is not None for block in blocks] == [True, True]


def test_a_request_that_will_reach_its_length_is_not_scheduled_again():
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", 5, max_tokens=2)
    executor = LateExecutor(scheduler, depth=4)
    assert [counts(executor.step()) for _ in range(3)] == [{"a": 5}, {"a": 1}, {}]
    executor.run()
    assert executor.outputs["a"] == continuation(executor.runner.token_ids["a"][:5], 2)


def test_tokens_of_steps_after_the_end_of_a_request_are_dropped():
    tokens = continuation(range(5), 3)
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5), params={"stop_token_ids": [tokens[1]]})
    executor = LateExecutor(scheduler, depth=3)
    executor.run()
    assert executor.outputs["a"] == tokens[:2]
    assert scheduler.make_stats().kv_cache_usage == 0


def test_tokens_in_flight_of_an_aborted_request_are_dropped_even_if_its_id_is_reused():
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    scheduler.finish_requests(["a"])
    add(scheduler, "a", range(20, 28), max_tokens=3)
    executor.step()  # the new request already runs when the old one's token returns
    executor.run()
    assert executor.outputs["a"] == continuation(range(20, 28), 3)


def test_a_preempted_request_drops_tokens_in_flight_and_samples_them_again():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5), max_tokens=4)
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    executor.step()
    assert scheduler.reset_prefix_cache(True)
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_output_placeholders, request.num_tokens) == (0, 5)
    output = executor.step()
    assert output.scheduled_cached_reqs.all_token_ids == {"a": list(range(5))}
    executor.run()
    assert executor.outputs["a"] == continuation(range(5), 4)


def test_a_request_waits_until_its_drafts_are_verified():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=2)
    right = continuation(range(5), 6)
    executor.step()
    executor.return_oldest_step()
    request.spec_token_ids = [right[1], 999]
    assert counts(executor.step()) == {"a": 3}
    output = scheduler.schedule()
    assert counts(output) == {}
    check_progress(scheduler, output)
    scheduler.check_invariants()
    executor.return_oldest_step()
    assert request.all_token_ids[5:] == right[:3]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (7, 0)


def test_drafts_are_counted_when_their_answer_comes():
    scheduler = make_scheduler(AsyncScheduler, num_lookahead_tokens=3)
    request = add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=2)
    right = continuation(range(5), 9)
    executor.step()
    executor.return_oldest_step()
    for drafts in ([right[1], right[2], 999], [999], right[5:7]):
        request.spec_token_ids = list(drafts)
        executor.step()
        executor.return_oldest_step()
    assert request.all_token_ids[5:] == right[: request.num_output_tokens]
    stats = scheduler.make_stats()
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (3, 6, 4)
    assert stats.num_accepted_per_pos == (2, 2, 0)


def test_engine_waits_for_drafts_only_after_a_step_that_names_a_request():
    scheduler = make_scheduler(AsyncScheduler, num_lookahead_tokens=3)
    add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    assert scheduler.is_waiting_for_drafts
    executor.step(8)
    assert counts(executor.step(8)) == {}
    executor.return_oldest_step()
    # The step had no drafts.
    assert not scheduler.is_waiting_for_drafts
    assert executor.step(8, drafts={"a": []}).num_decode_steps == 8
    assert executor.step(8).num_decode_steps == 8
    executor.return_oldest_step()
    # The first burst names a request without drafts.
    assert scheduler.is_waiting_for_drafts
    assert executor.step(8).num_decode_steps == 1


def test_drafts_in_flight_do_not_move_a_window():
    scheduler = make_scheduler(AsyncScheduler, specs=(window(5),))
    request = add(scheduler, "a", range(8))
    executor = LateExecutor(scheduler, depth=2)
    executor.step()
    executor.return_oldest_step()
    request.spec_token_ids = [990, 991, 992, 993, 994, 995]
    assert counts(executor.step()) == {"a": 7}
    # If the drafts were right, token 15 would see 11 to 15. They are not: token 9 sees 5 to 9.
    assert request.num_computed_tokens == 15
    assert counts(scheduler.schedule()) == {}
    executor.return_oldest_step()
    assert request.num_computed_tokens == 9
    executor.step()
    (table,) = scheduler.kv_cache_manager.get_block_ids("a")
    assert [block_id == 0 for block_id in table] == [True, False, False, False]


def test_late_drafts_are_not_kept():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    executor.step(drafts={"a": [1, 2]})
    executor.step()
    executor.return_oldest_step()
    assert request.spec_token_ids == []


def test_results_out_of_order_or_with_several_tokens_raise():
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5))
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(InvariantError, match="not the oldest of the 2 in flight"):
        scheduler.update_from_output(second, answer({"a": [7]}))
    with pytest.raises(InvariantError, match="at most 1 were scheduled"):
        scheduler.update_from_output(first, answer({"a": [7, 8]}))


def test_a_burst_returns_one_token_per_computed_token():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=4)
    executor.step(8)
    assert counts(executor.step(3)) == {"a": 3}
    assert (request.num_computed_tokens, request.num_output_placeholders) == (8, 4)
    output = executor.step(2)
    assert output.scheduled_cached_reqs.num_computed_tokens == [8]
    assert output.scheduled_cached_reqs.num_output_tokens == [4]
    assert (request.num_computed_tokens, request.num_output_placeholders) == (10, 6)
    executor.return_oldest_step()
    executor.return_oldest_step()
    assert (request.num_tokens, request.num_output_placeholders) == (9, 2)
    executor.run(max_decode_steps=3)
    assert executor.outputs["a"] == continuation(range(5), 20)


def test_consecutive_bursts_give_each_request_its_own_tokens():
    scheduler = make_scheduler(AsyncScheduler)
    executor = LateExecutor(scheduler, depth=2)
    lengths = {"a": (5, 20), "b": (7, 11), "c": (3, 2)}
    for name, (num_prompt_tokens, max_tokens) in lengths.items():
        add(scheduler, name, range(num_prompt_tokens), max_tokens=max_tokens)
    steps = [executor.step(4) for _ in range(6)]
    assert [counts(output) for output in steps] == [
        {"a": 5, "b": 3, "c": 3},  # "b" shares a block with "a"
        {"a": 4, "b": 4, "c": 1},
        {"a": 4, "b": 4},
        {"a": 4, "b": 2},
        {"a": 4},
        {"a": 3},
    ]
    executor.run()
    for name, (num_prompt_tokens, max_tokens) in lengths.items():
        assert executor.outputs[name] == continuation(range(num_prompt_tokens), max_tokens)


@pytest.mark.parametrize("max_decode_steps", [1, 4])
def test_steps_scheduled_after_a_burst_that_ends_early_are_dropped(max_decode_steps):
    tokens = continuation(range(5), 4)
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5), params={"stop_token_ids": [tokens[2]]}, keep_blocks=True)
    add(scheduler, "b", range(6))
    executor = LateExecutor(scheduler, depth=2)
    executor.step()
    executor.step(4)
    assert counts(executor.step(max_decode_steps)) == {
        "a": max_decode_steps,
        "b": max_decode_steps,
    }
    assert executor.outputs["a"] == tokens[:3]
    (kept,) = scheduler.kept_requests
    # The next step should compute the last token, but the device knew of the end.
    assert (kept.num_tokens, kept.num_computed_tokens) == (8, 7)
    add(scheduler, "fork", [*range(5), *tokens[:3], 99], max_tokens=2, fork_from="a")
    assert executor.step().scheduled_new_reqs[0].num_computed_tokens == 7
    executor.run(max_decode_steps=4)
    assert executor.outputs["a"] == tokens[:3]
    assert executor.outputs["b"] == continuation(range(6), 20)


def test_tokens_of_a_burst_in_flight_do_not_count_for_an_ended_request():
    tokens = continuation(range(5), 1)
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5), params={"stop_token_ids": tokens}, keep_blocks=True)
    executor = LateExecutor(scheduler, depth=2)
    executor.step()
    assert counts(executor.step(4)) == {"a": 4}
    (kept,) = scheduler.kept_requests
    assert (kept.num_tokens, kept.num_computed_tokens) == (6, 5)


def test_an_aborted_request_drops_its_burst_even_if_its_id_is_reused():
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    assert counts(executor.step(4)) == {"a": 4}
    scheduler.finish_requests(["a"])
    assert scheduler.make_stats().kv_cache_usage == 0
    add(scheduler, "a", range(20, 28), max_tokens=3)
    executor.run(max_decode_steps=4)
    assert executor.outputs["a"] == continuation(range(20, 28), 3)


def test_a_preempted_request_samples_its_burst_again():
    scheduler = make_scheduler(AsyncScheduler)
    request = add(scheduler, "a", range(5), max_tokens=9)
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    executor.step(4)
    assert scheduler.reset_prefix_cache(True)
    assert (request.num_output_placeholders, request.num_tokens) == (0, 5)
    assert counts(executor.step(4)) == {"a": 5}
    executor.run(max_decode_steps=4)
    assert executor.outputs["a"] == continuation(range(5), 9)


def test_a_request_in_a_burst_is_preempted_when_blocks_run_out():
    # 7 blocks: each request has 3 after the burst, and one is free.
    scheduler = make_scheduler(AsyncScheduler, num_blocks=8, caching=False)
    first = add(scheduler, "a", range(6), max_tokens=10)
    second = add(scheduler, "b", range(7), max_tokens=10)
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    assert counts(executor.step(5)) == {"a": 5, "b": 5}
    outputs = [executor.step() for _ in range(2)]
    assert outputs[-1].preempted_req_ids == {"b"}
    assert (first.num_output_placeholders, second.num_output_placeholders) == (2, 0)
    executor.run(max_decode_steps=5)
    assert executor.outputs["a"] == continuation(range(6), 10)
    assert executor.outputs["b"] == continuation(range(7), 10)


def test_blocks_filled_in_a_burst_are_cached_when_it_returns():
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=3)
    executor.step()
    executor.step(8)
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    executor.return_oldest_step()
    assert [block.block_hash is not None for block in blocks] == [True, False, False, False]
    executor.return_oldest_step()
    assert [block.block_hash is not None for block in blocks] == [True, True, True, False]


@pytest.mark.parametrize(("num_tokens", "message"), [(2, "did not end; 3"), (4, "at most 3")])
def test_a_burst_with_too_few_or_too_many_tokens_raises(num_tokens, message):
    scheduler = make_scheduler(AsyncScheduler)
    add(scheduler, "a", range(5))
    executor = LateExecutor(scheduler, depth=2)
    executor.step()
    output = scheduler.schedule(3)
    scheduler.schedule(3)
    executor.return_oldest_step()
    with pytest.raises(InvariantError, match=message):
        scheduler.update_from_output(output, answer({"a": list(range(500, 500 + num_tokens))}))


@given(
    seed=st.integers(0, 2**32),
    policy=st.sampled_from(["fcfs", "priority"]),
    caching=st.booleans(),
    must_fit=st.booleans(),
    num_blocks=st.integers(9, 20),
    specs=st.sampled_from([None, (window(6),)]),
    depth=st.integers(1, 4),
    max_decode_steps=st.sampled_from([1, 4, 8]),
    knows_ends=st.booleans(),
)
def test_asynchronous_and_sequential_scheduling_give_equal_tokens(
    seed, policy, caching, must_fit, num_blocks, specs, depth, max_decode_steps, knows_ends
):
    draw = random.Random(seed)
    scheduler = make_scheduler(
        AsyncScheduler,
        num_blocks=num_blocks,
        max_model_len=30,
        caching=caching,
        policy=policy,
        full_sequence_must_fit=must_fit,
        max_num_batched_tokens=draw.randint(6, 20),
        max_num_seqs=3,
        **({} if specs is None else {"specs": specs}),
    )
    executor = LateExecutor(scheduler, depth=depth, knows_ends=knows_ends)
    prompts = {}
    for i in range(6):
        prompts[f"r{i}"] = prompt = [0, 1, 2, 3, 4] * draw.choice([0, 1]) + [draw.randrange(9)]
        params = {"stop_token_ids": [draw.randrange(97)]}
        max_tokens = draw.randint(1, 12)
        add(
            scheduler,
            f"r{i}",
            prompt,
            max_tokens=max_tokens,
            params=params,
            priority=-i * draw.choice([0, 1]),
        )
        for _ in range(draw.randint(0, 4)):
            if scheduler.has_unfinished_requests():
                executor.step(draw.randint(1, max_decode_steps))
        if draw.random() < 0.1:
            scheduler.reset_prefix_cache(True)
        prompts[f"r{i}"] = (prompt, max_tokens, params["stop_token_ids"][0])
    executor.run(max_decode_steps=max_decode_steps)
    assert not scheduler.has_unfinished_requests()
    for request_id, (prompt, max_tokens, stop) in prompts.items():
        wanted = continuation(prompt, max_tokens)
        if stop in wanted:
            wanted = wanted[: wanted.index(stop) + 1]
        assert executor.outputs[request_id] == wanted
    assert scheduler.make_stats().kv_cache_usage == 0
    assert scheduler.reset_prefix_cache()


class OpenGate:
    """A grammar gate for which every grammar is compiled."""

    def is_ready(self, request_id):
        return True


def test_request_with_a_grammar_waits_for_its_last_token():
    scheduler = make_scheduler(AsyncScheduler, grammar_gate=OpenGate(), max_num_batched_tokens=4)
    bound = add(scheduler, "a", range(6), needs_grammar=True, max_tokens=3)
    executor = LateExecutor(scheduler, depth=3)
    # Parts of its prompt do not wait for each other.
    assert [counts(executor.step(8)) for _ in range(2)] == [{"a": 4}, {"a": 2}]
    add(scheduler, "b", range(2))
    assert counts(executor.step(8)) == {"b": 2}
    assert bound.num_output_placeholders == 1
    executor.return_oldest_step()
    output = executor.step(8)
    assert (counts(output), output.num_decode_steps) == ({"a": 1, "b": 1}, 1)
    executor.run(max_decode_steps=8)
    assert executor.outputs["a"] == continuation(range(6), 3)
