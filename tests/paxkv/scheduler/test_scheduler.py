"""The scheduler's rules, one by one, with expected steps computed by hand."""

import pytest

from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from paxkv.contracts.scheduler_output import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from paxkv.errors import InvalidRequestError, InvariantError, NeverFitsError
from paxkv.kv_cache.observers.metrics_collector import KVCacheMetricsCollector
from paxkv.scheduler.request import RequestStatus
from paxkv.scheduler.scheduler import Scheduler

FULL = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")


def make_scheduler(
    *,
    num_blocks=100,
    max_model_len=64,
    enable_prefix_caching=True,
    num_groups=1,
    specs=None,
    more_specs=(),
    count_common_prefix_blocks=False,
    kv_events_config=None,
    kv_cache_metrics_sample=0.01,
    **config,
):
    specs = (*(specs or (FULL,) * num_groups), *more_specs)
    groups = tuple(KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=spec) for spec in specs)
    return Scheduler(
        scheduler_config=SchedulerConfig(**({"max_num_seqs": 4} | config)),
        cache_config=CacheConfig(
            enable_prefix_caching=enable_prefix_caching,
            kv_events_config=kv_events_config,
            kv_cache_metrics_sample=kv_cache_metrics_sample,
        ),
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=groups),
        max_model_len=max_model_len,
        count_common_prefix_blocks=count_common_prefix_blocks,
    )


def window(num_tokens):
    return SlidingWindowSpec(
        block_size=4, num_kv_heads=1, head_size=8, dtype="float32", sliding_window=num_tokens
    )


def add(scheduler, request_id, prompt, *, max_tokens=20, **fields):
    """`prompt` is token ids, or a length, for tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [1000 * (1 + sum(request_id.encode())) + i for i in range(prompt)]
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=[99])
    scheduler.add_request(
        EngineRequest(
            request_id=request_id, prompt_token_ids=prompt, sampling_params=params, **fields
        )
    )


def answer(output, tokens):
    return ModelRunnerOutput(
        req_ids=list(tokens),
        sampled_token_ids=list(tokens.values()),
        logprobs=[None] * len(tokens),
    )


def step(scheduler, token_ids=(7,)):
    """Runs one step. Every request whose tokens are all computed gets `token_ids`."""
    output = scheduler.schedule()
    scheduler.check_invariants()
    tokens = {}
    for req_id in output.num_scheduled_tokens:
        request = scheduler.requests[req_id]
        is_done = request.num_computed_tokens == request.num_tokens
        tokens[req_id] = list(token_ids) if is_done else []
    scheduler.update_from_output(output, answer(output, tokens))
    scheduler.check_invariants()
    return output


def counts(output):
    return output.num_scheduled_tokens


def ids(queue):
    return [request.request_id for request in queue]


def test_running_requests_get_tokens_of_the_budget_before_waiting_ones():
    scheduler = make_scheduler(max_num_batched_tokens=10)
    add(scheduler, "a", 6)
    add(scheduler, "b", 13)
    assert counts(step(scheduler)) == {"a": 6, "b": 4}
    add(scheduler, "c", 5)
    assert counts(step(scheduler)) == {"a": 1, "b": 9}
    assert counts(step(scheduler)) == {"a": 1, "b": 1, "c": 5}


def test_long_prefill_threshold_limits_waiting_and_running_requests():
    scheduler = make_scheduler(max_num_batched_tokens=10, long_prefill_token_threshold=3)
    add(scheduler, "a", 8)
    add(scheduler, "b", 9)
    assert [counts(step(scheduler)) for _ in range(4)] == [
        {"a": 3, "b": 3},
        {"a": 3, "b": 3},
        {"a": 2, "b": 3},
        {"a": 1, "b": 1},
    ]


def test_without_chunked_prefill_a_prompt_over_the_budget_ends_the_scan():
    scheduler = make_scheduler(max_num_batched_tokens=10, enable_chunked_prefill=False)
    for request_id, num_tokens in (("a", 6), ("b", 8), ("c", 2)):
        add(scheduler, request_id, num_tokens)
    assert counts(step(scheduler)) == {"a": 6}
    assert counts(step(scheduler)) == {"a": 1, "b": 8}
    assert counts(step(scheduler)) == {"a": 1, "b": 1, "c": 2}


def test_without_chunked_prefill_a_prompt_longer_than_a_step_is_rejected():
    config = {"max_num_batched_tokens": 10, "enable_chunked_prefill": False}
    with pytest.raises(InvalidRequestError, match="11 tokens > 10 .* without chunked prefill"):
        add(make_scheduler(**config), "a", 11)
    for threshold, steps in ((6, [6, 5]), (10, [10, 1]), (1, [1] * 11)):
        scheduler = make_scheduler(**config, long_prefill_token_threshold=threshold)
        add(scheduler, "a", 11)
        assert [counts(step(scheduler)) for _ in steps] == [{"a": num} for num in steps]


def test_without_chunked_prefill_a_resumed_request_over_the_budget_still_resumes():
    scheduler = make_scheduler(
        num_blocks=6, max_num_batched_tokens=8, enable_chunked_prefill=False, max_num_seqs=2
    )
    add(scheduler, "a", 3, max_tokens=18)
    add(scheduler, "b", 3, max_tokens=18)
    for _ in range(60):
        step(scheduler)
    assert scheduler.num_preemptions > 0
    assert not scheduler.has_unfinished_requests()


def test_at_most_max_num_seqs_run():
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        add(scheduler, request_id, 2, max_tokens=2)
    assert counts(step(scheduler)) == {"a": 2, "b": 2}
    assert counts(step(scheduler)) == {"a": 1, "b": 1}
    assert counts(step(scheduler)) == {"c": 2}


def test_equal_prompts_share_blocks_even_in_one_step():
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(10)))
    add(scheduler, "b", list(range(10)))
    first, second = step(scheduler).scheduled_new_reqs
    assert (first.block_ids, first.num_computed_tokens) == (([1, 2, 3],), 0)
    assert (second.block_ids, second.num_computed_tokens) == (([1, 2, 4],), 8)
    stats = scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)
    assert (stats.num_allocated_slots, stats.num_used_slots) == (16, 12)


def test_without_prefix_caching_nothing_is_shared():
    scheduler = make_scheduler(enable_prefix_caching=False, num_groups=2)
    add(scheduler, "a", list(range(6)))
    add(scheduler, "b", list(range(6)))
    first, second = step(scheduler).scheduled_new_reqs
    assert first.block_ids == ([1, 2], [3, 4])
    assert second.block_ids == ([5, 6], [7, 8])
    assert scheduler.make_stats().prefix_cache_queries == 0


def test_running_requests_are_reported_as_differences():
    scheduler = make_scheduler()
    add(scheduler, "a", 7)
    step(scheduler)
    cached = [step(scheduler).scheduled_cached_reqs for _ in range(2)]
    assert [c.req_ids for c in cached] == [["a"], ["a"]]
    assert [c.num_computed_tokens for c in cached] == [[7], [8]]
    assert [c.num_output_tokens for c in cached] == [[1], [2]]
    assert [c.new_block_ids for c in cached] == [[None], [([3],)]]
    assert not any(c.resumed_req_ids or c.all_token_ids for c in cached)


def make_full_pool(**config):
    """Four blocks. Two prompts of 7 tokens hold two each, and need a third in the third step."""
    scheduler = make_scheduler(num_blocks=5, **config)
    add(scheduler, "a", 7, max_tokens=4)
    add(scheduler, "b", 7, max_tokens=4)
    step(scheduler)
    step(scheduler)
    return scheduler


def test_fcfs_preempts_the_last_request_and_admits_none_in_that_step():
    scheduler = make_full_pool()
    add(scheduler, "c", 1, max_tokens=4)
    output = step(scheduler)
    assert counts(output) == {"a": 1}
    assert output.preempted_req_ids == {"b"}
    assert ids(scheduler.waiting) == ["b", "c"]
    victim = scheduler.requests["b"]
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions, victim.num_tokens) == (0, 1, 9)
    # "b" needs 3 blocks and 1 is free; "c" would fit, but is not admitted before "b".
    output = step(scheduler)
    assert (counts(output), output.preempted_req_ids) == ({"a": 1}, frozenset())


def test_a_resumed_request_is_reported_in_full_and_hits_its_own_blocks():
    scheduler = make_full_pool()
    prompt = scheduler.requests["b"].prompt_token_ids
    step(scheduler)
    step(scheduler)  # "a" ends with its 4th token
    output = step(scheduler)
    cached = output.scheduled_cached_reqs
    assert output.finished_req_ids == {"a"}
    assert (cached.req_ids, cached.resumed_req_ids) == (["b"], {"b"})
    assert cached.all_token_ids == {"b": [*prompt, 7, 7]}
    # Its blocks 3 and 4 were freed in reverse, and "a" got 4. Tokens 0..3 are still in 3.
    assert cached.num_computed_tokens == [4]
    assert counts(output) == {"b": 5}
    (table,) = cached.new_block_ids[0]
    assert (table[0], len(table)) == (3, 3)
    # Users see the hit of the first admission.
    assert scheduler.requests["b"].num_cached_tokens == 0
    assert scheduler.make_stats().prefix_cache_hits == 0
    assert scheduler.make_stats().num_preemptions == 1


def test_a_request_that_needs_a_block_may_preempt_itself():
    scheduler = make_scheduler(num_blocks=5)
    add(scheduler, "a", 5, max_tokens=4)
    add(scheduler, "b", 8, max_tokens=4)
    step(scheduler)
    output = step(scheduler)
    assert (counts(output), output.preempted_req_ids) == ({"a": 1}, {"b"})


def test_priority_takes_back_tokens_of_a_request_preempted_in_this_step():
    scheduler = make_scheduler(
        num_blocks=12, policy="priority", max_num_batched_tokens=17, long_prefill_token_threshold=12
    )
    add(scheduler, "low", 36, priority=5, max_tokens=1)
    assert counts(step(scheduler)) == {"low": 12}
    add(scheduler, "high", 4, priority=0, max_tokens=2)
    add(scheduler, "mid", 7, priority=1, max_tokens=1)
    assert counts(step(scheduler)) == {"low": 12, "high": 4, "mid": 1}
    # "low" is scheduled first, with 12 tokens and the last 3 blocks; then "high" needs a block.
    # As the 12 tokens are taken back, "mid" gets all its 6. Otherwise only 4 would be left.
    output = step(scheduler)
    assert (counts(output), output.preempted_req_ids) == ({"high": 1, "mid": 6}, {"low"})
    assert output.scheduled_cached_reqs.req_ids == ["high", "mid"]
    # The 3 blocks had the hashes of tokens 24..35, but were never written. "high" and "mid" got
    # two of them; the third must not be a hit: "low" must find only computed tokens.
    output = step(scheduler)
    assert output.scheduled_cached_reqs.num_computed_tokens == [24]
    assert counts(output) == {"low": 12}


def test_under_priority_self_preemption_does_not_stop_later_requests():
    scheduler = make_scheduler(num_blocks=5, policy="priority")
    add(scheduler, "low", 7, priority=5, max_tokens=4)
    step(scheduler)
    add(scheduler, "high", 8, priority=0, max_tokens=4)
    assert counts(step(scheduler)) == {"low": 1, "high": 8}
    # All 4 blocks are held, and both requests need a third; "low" is scheduled first.
    output = step(scheduler)
    assert (counts(output), output.preempted_req_ids) == ({"high": 1}, {"low"})


def test_under_priority_the_latest_of_equal_requests_is_preempted():
    scheduler = make_scheduler(num_blocks=5, policy="priority")
    add(scheduler, "late", 7, arrival_time=2.0, max_tokens=4)
    step(scheduler)
    add(scheduler, "early", 8, arrival_time=1.0, max_tokens=4)
    assert counts(step(scheduler)) == {"late": 1, "early": 8}
    output = step(scheduler)
    assert (counts(output), output.preempted_req_ids) == ({"early": 1}, {"late"})


def test_a_request_without_tokens_to_compute_is_skipped():
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    add(scheduler, "b", 3)
    output = scheduler.schedule()
    scheduler.update_from_output(output, answer(output, {"a": [], "b": [7]}))
    assert counts(step(scheduler)) == {"b": 1}


def test_requests_are_admitted_by_priority_then_arrival():
    scheduler = make_scheduler(policy="priority", max_num_seqs=3)
    for request_id, priority, arrival_time in (("a", 1, 0.0), ("b", 0, 2.0), ("c", 0, 1.0)):
        add(scheduler, request_id, 2, priority=priority, arrival_time=arrival_time)
    assert list(counts(step(scheduler))) == ["c", "b", "a"]


def test_a_request_ends_at_max_model_len_and_never_computes_its_last_position():
    scheduler = make_scheduler(max_model_len=8)
    add(scheduler, "a", 6)
    output = scheduler.schedule()
    (result,) = scheduler.update_from_output(output, answer(output, {"a": [1, 2, 3, 4]}))
    assert (result.new_token_ids, result.finish_reason) == ([1, 2], "length")
    add(scheduler, "b", 6)
    assert sum(sum(counts(step(scheduler)).values()) for _ in range(3)) == 7
    assert not scheduler.has_unfinished_requests()


def test_several_sampled_tokens_are_all_computed_in_the_next_step():
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    step(scheduler, token_ids=(7, 8, 9))
    output = step(scheduler)
    assert counts(output) == {"a": 3}
    assert output.scheduled_cached_reqs.num_output_tokens == [3]
    assert scheduler.requests["a"].all_token_ids[5:] == [7, 8, 9, 7]


def test_a_stop_token_ends_the_request_and_frees_its_blocks():
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    output = scheduler.schedule()
    (result,) = scheduler.update_from_output(output, answer(output, {"a": [7, 99, 8]}))
    assert (result.new_token_ids, result.stop_reason) == ([7, 99], 99)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.has_finished_requests()
    assert scheduler.make_stats().kv_cache_usage == 0
    assert scheduler.schedule().finished_req_ids == {"a"}
    assert not scheduler.has_finished_requests()


def test_running_waiting_and_unknown_requests_can_be_finished():
    scheduler = make_full_pool()
    step(scheduler)
    add(scheduler, "c", 1, max_tokens=4)
    assert ids(scheduler.running) == ["a"]
    assert ids(scheduler.waiting) == ["b", "c"]
    scheduler.finish_requests(["unknown", "b", "a", "b", "c"])
    scheduler.check_invariants()
    assert scheduler.num_unfinished_requests() == 0
    assert scheduler.make_stats().num_free_blocks == 4
    scheduler.finish_requests(["a"])
    assert scheduler.schedule().finished_req_ids == {"a", "b", "c"}


def test_tokens_of_a_request_finished_while_the_step_ran_are_dropped():
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    output = scheduler.schedule()
    scheduler.finish_requests(["a", "b"], "stop")
    add(scheduler, "b", 6)  # another request with the same id
    runner_output = answer(output, {"a": [7], "b": [7]})
    assert scheduler.update_from_output(output, runner_output) == []
    assert scheduler.requests["b"].num_output_tokens == 0
    output = step(scheduler)
    assert output.finished_req_ids == {"a", "b"}
    assert [new.req_id for new in output.scheduled_new_reqs] == ["b"]


def test_an_id_in_use_is_rejected():
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    with pytest.raises(InvalidRequestError, match="'a' is taken"):
        add(scheduler, "a", 6)
    assert scheduler.num_unfinished_requests() == 1


def test_add_request_rejects_a_request_that_could_never_finish():
    scheduler = make_scheduler(num_blocks=5)
    assert scheduler.max_tokens_that_fit == 16
    with pytest.raises(NeverFitsError, match="5 KV cache blocks; there are 4"):
        add(scheduler, "a", 10, max_tokens=8)
    # 17 tokens, the last of which is never written: 16 slots.
    add(scheduler, "a", 10, max_tokens=7)
    for _ in range(7):
        step(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.num_preemptions == 0


def test_runner_output_that_does_not_fit_the_step_raises():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    output = scheduler.schedule()
    with pytest.raises(InvariantError, match="'b' was computed but not scheduled"):
        scheduler.update_from_output(output, answer(output, {"b": [7]}))
    with pytest.raises(InvariantError, match="before its tokens were computed"):
        scheduler.update_from_output(output, answer(output, {"a": [7]}))


def test_a_step_without_requests_is_empty():
    scheduler = make_scheduler()
    output = scheduler.schedule()
    assert (output.total_num_scheduled_tokens, counts(output)) == (0, {})
    assert scheduler.update_from_output(output, EMPTY_MODEL_RUNNER_OUTPUT) == []
    assert scheduler.make_stats().num_steps == 0


def test_reset_fails_until_the_last_request_ends():
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(9)))
    step(scheduler)
    assert not scheduler.reset_prefix_cache()
    scheduler.finish_requests(["a"])
    assert scheduler.reset_prefix_cache()
    add(scheduler, "b", list(range(9)))
    assert step(scheduler).scheduled_new_reqs[0].num_computed_tokens == 0


def test_check_invariants_detects_a_waiting_request_that_holds_blocks():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 5)
    add(scheduler, "b", 5)
    step(scheduler)
    scheduler.kv_cache_manager.allocate_slots(scheduler.requests["b"], 5)
    with pytest.raises(InvariantError, match="waits and holds blocks"):
        scheduler.check_invariants()


def test_common_prefix_blocks_are_counted_if_enabled():
    for is_asked, expected in ((True, [[2], [2]]), (False, [[], []])):
        scheduler = make_scheduler(count_common_prefix_blocks=is_asked)
        for request_id in "ab":
            add(scheduler, request_id, [*range(8), 90 + ord(request_id)])
        outputs = [step(scheduler), step(scheduler)]
        assert [output.num_common_prefix_blocks for output in outputs] == expected
        assert scheduler.schedule().num_common_prefix_blocks == expected[0]


def test_drain_events_returns_each_event_once():
    scheduler = make_scheduler(kv_events_config='{"endpoint": "tcp://127.0.0.1:*"}')
    add(scheduler, "a", list(range(9)))
    step(scheduler)
    (event,) = scheduler.drain_events()
    assert (type(event).__name__, event.token_ids) == ("BlockStored", list(range(8)))
    assert scheduler.drain_events() == []


def test_without_kv_events_config_no_events_are_recorded():
    scheduler = make_scheduler()
    add(scheduler, "a", list(range(9)))
    step(scheduler)
    assert scheduler.drain_events() == []
    observers = scheduler.kv_cache_manager.block_pool.observers
    assert [type(observer) for observer in observers] == [KVCacheMetricsCollector]
    without = make_scheduler(kv_cache_metrics_sample=0.0)
    assert without.kv_cache_manager.block_pool.observers == ()


def test_a_prefix_cache_miss_is_explained_even_after_the_request_ended():
    scheduler = make_scheduler()
    add(scheduler, "a", [1, 2], max_tokens=1)
    assert scheduler.explain_prefix_cache_miss("a").reason == "too_short"
    step(scheduler)
    assert scheduler.explain_prefix_cache_miss("a").reason == "too_short"
    with pytest.raises(InvalidRequestError, match="unknown"):
        scheduler.explain_prefix_cache_miss("unknown")


def test_make_stats_counts_slots_or_repeats_the_last_count():
    scheduler = make_scheduler()
    add(scheduler, "a", 5)
    step(scheduler)
    assert scheduler.make_stats().num_used_slots == 5
    step(scheduler)
    assert scheduler.make_stats(count_slots=False).num_used_slots == 5
    assert scheduler.make_stats().num_used_slots == 6


def test_a_window_limits_the_blocks_of_a_long_request():
    scheduler = make_scheduler(num_blocks=6, specs=(window(5),), max_num_batched_tokens=8)
    # 40 tokens would need 10 blocks; a window of 5 and a chunk of 8 need 4 at once.
    add(scheduler, "a", 30, max_tokens=10)
    for _ in range(20):
        step(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.num_preemptions == 0
