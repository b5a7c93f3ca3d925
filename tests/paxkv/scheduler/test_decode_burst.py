"""Bursts: when a step becomes a burst, its length, its blocks, and how requests end in it."""

import pytest

from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.contracts.kv_cache_spec import MambaSpec
from paxkv.errors import InvariantError
from paxkv.scheduler.decode_burst import DecodeBursts
from tests.paxkv.scheduler.in_memory_connector import InMemoryConnector
from tests.paxkv.scheduler.stepping import (
    FULL,
    FunctionRunner,
    add,
    answer,
    continuation,
    counts,
    make_scheduler,
    step,
    window,
)

STATE = MambaSpec(block_size=4, page_bytes=256, state_bytes=32, blocks_per_state=1)


def make_decoding(
    lengths=(5,), *, max_tokens=20, runner=None, params=None, eos_token_ids=(), **settings
):
    """Requests "a", "b" and so on, whose prompts are computed and that have one sampled token."""
    scheduler = make_scheduler(**settings)
    runner = FunctionRunner() if runner is None else runner
    for name, length in zip("abcd", lengths, strict=False):
        add(
            scheduler,
            name,
            range(length),
            max_tokens=max_tokens,
            params=params,
            eos_token_ids=eos_token_ids,
        )
    step(scheduler, runner)
    return scheduler, runner


def new_block_ids(output):
    cached = output.scheduled_cached_reqs
    return dict(zip(cached.req_ids, cached.new_block_ids, strict=True))


def test_a_burst_of_decodes_may_exceed_the_token_budget():
    scheduler, runner = make_decoding((5, 7), max_num_batched_tokens=12)
    output = step(scheduler, runner, 8)
    assert output.num_decode_steps == 8
    assert counts(output) == {"a": 8, "b": 8}
    assert output.total_num_scheduled_tokens == 16
    assert output.scheduled_cached_reqs.num_computed_tokens == [5, 7]
    for name, length in (("a", 5), ("b", 7)):
        request = scheduler.requests[name]
        assert request.all_token_ids[length:] == continuation(range(length), 9)
        # The last token is computed by the next step.
        assert request.num_computed_tokens == length + 8
    output = step(scheduler, runner)
    assert (output.num_decode_steps, counts(output)) == (1, {"a": 1, "b": 1})


def test_a_burst_has_at_most_the_allowed_number_of_steps():
    scheduler, runner = make_decoding()
    for max_decode_steps in (1, 2, 3, 5):
        output = step(scheduler, runner, max_decode_steps)
        assert output.num_decode_steps == counts(output)["a"] == max_decode_steps


def test_there_is_no_burst_while_a_request_waits():
    scheduler, runner = make_decoding((5, 5), max_tokens=3, max_num_seqs=1)
    assert step(scheduler, runner, 8).num_decode_steps == 1
    step(scheduler, runner, 8)
    assert list(scheduler.requests) == ["b"]
    # The step that admits "b" is no burst either, but the next one is.
    assert [step(scheduler, runner, 8).num_decode_steps for _ in range(2)] == [1, 2]


def test_there_is_no_burst_while_a_prompt_is_computed():
    scheduler, runner = make_decoding((5,), max_num_batched_tokens=6)
    add(scheduler, "b", 12)
    steps = [step(scheduler, runner, 4) for _ in range(4)]
    assert [counts(output) for output in steps] == [
        {"a": 1, "b": 5},
        {"a": 1, "b": 5},
        {"a": 1, "b": 2},
        {"a": 4, "b": 4},
    ]


def test_there_is_no_burst_while_a_request_resumes():
    scheduler, runner = make_decoding()
    assert scheduler.reset_prefix_cache(True)
    output = step(scheduler, runner, 4)
    assert (output.num_decode_steps, counts(output)) == (1, {"a": 6})
    assert step(scheduler, runner, 4).num_decode_steps == 4


def test_there_is_no_burst_while_drafts_are_verified():
    scheduler, runner = make_decoding()
    step(scheduler, runner, drafts={"a": [1]})
    output = step(scheduler, runner, 4)
    assert (output.num_decode_steps, counts(output)) == (1, {"a": 2})
    # The draft was wrong, so its slot is used again.
    assert counts(step(scheduler, runner, 4)) == {"a": 4}


def test_a_step_that_preempts_is_not_a_burst():
    # All 10 blocks are full, and both requests need another: "b" loses its 6.
    scheduler, runner = make_decoding((16, 24), max_tokens=9, num_blocks=11, caching=False)
    output = step(scheduler, runner, 4)
    assert output.preempted_req_ids == {"b"}
    assert (output.num_decode_steps, counts(output)) == (1, {"a": 1})


@pytest.mark.parametrize(
    ("settings", "are_possible"),
    [
        ({}, True),
        ({"specs": (FULL, window(5))}, True),
        ({"caching": False}, True),
        ({"connector": InMemoryConnector()}, False),
        ({"specs": (STATE,)}, True),
    ],
)
def test_there_are_no_bursts_with_a_connector(settings, are_possible):
    scheduler, runner = make_decoding(**settings)
    bursts = DecodeBursts(scheduler.kv_cache_manager, settings.get("connector"))
    assert bursts.are_possible is are_possible
    answers = {"transfers": {}} if "connector" in settings else {}
    output = step(scheduler, runner, 4, **answers)
    assert output.num_decode_steps == counts(output)["a"] == (4 if are_possible else 1)


def test_a_burst_computes_no_token_past_a_requests_end():
    scheduler, runner = make_scheduler(), FunctionRunner()
    for name, max_tokens in (("a", 4), ("b", 20), ("c", 2)):
        add(scheduler, name, range(5), max_tokens=max_tokens)
    step(scheduler, runner)
    output = step(scheduler, runner, 8)
    # One token is computed, and the last is only sampled.
    assert counts(output) == {"a": 3, "b": 8, "c": 1}
    assert output.num_decode_steps == 8
    assert list(scheduler.requests) == ["b"]
    assert counts(step(scheduler, runner, 8)) == {"b": 8}
    output = step(scheduler, runner, 8)
    # 20 - 1 - 8 - 8 = 3: no step of the burst is without requests.
    assert (output.num_decode_steps, counts(output)) == (3, {"b": 3})
    assert not scheduler.requests


def test_a_burst_ends_at_max_model_len():
    scheduler, runner = make_decoding((12,), max_tokens=None, max_model_len=16)
    output = step(scheduler, runner, 8)
    # Token 15 is only sampled; 13 tokens are computed.
    assert (output.num_decode_steps, counts(output)) == (3, {"a": 3})
    assert not scheduler.requests


@pytest.mark.parametrize(
    ("num_prompt_tokens", "num_free_blocks", "num_steps"),
    [(13, 4, 8), (13, 3, 4), (13, 2, 4), (13, 1, 2), (13, 0, 2), (15, 1, 1), (15, 0, 1)],
)
def test_a_burst_is_shortened_instead_of_preempting_requests(
    num_prompt_tokens, num_free_blocks, num_steps
):
    # Each has 16 slots, of which 3 or 1 are unused.
    scheduler, runner = make_decoding(
        (num_prompt_tokens,) * 2, max_tokens=9, caching=False, num_blocks=9 + num_free_blocks
    )
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == num_free_blocks
    output = step(scheduler, runner, 8)
    assert output.num_decode_steps == num_steps
    assert counts(output) == {"a": num_steps, "b": num_steps}
    assert scheduler.num_preemptions == 0


def test_blocks_kept_for_forks_are_not_freed_for_a_burst():
    scheduler, runner = make_scheduler(num_blocks=6, caching=False), FunctionRunner()
    add(scheduler, "kept", range(9), max_tokens=1, keep_blocks=True)
    step(scheduler, runner)
    add(scheduler, "a", range(5), max_tokens=9)
    step(scheduler, runner)
    # No block is free. "a" has 3 unused slots, and 4 tokens would need a block.
    assert step(scheduler, runner, 8).num_decode_steps == 2
    assert len(scheduler.kept_requests) == 1


def test_blocks_of_the_step_precede_blocks_of_the_burst():
    scheduler, runner = make_decoding((8, 5), specs=(FULL, window(6)))
    tables = {name: scheduler.kv_cache_manager.get_block_ids(name) for name in "ab"}
    # Token 8 of "a" begins a block, which the step allocates; the burst allocates the other.
    output = scheduler.schedule(7)
    new = new_block_ids(output)
    assert new == {"a": ([7, 9], [8, 10]), "b": ([11], [12])}
    for name in "ab":
        for group, table in enumerate(scheduler.kv_cache_manager.get_block_ids(name)):
            num_before = len(tables[name][group])
            # The runner appends the new blocks, and has the same table.
            assert table[num_before:] == new[name][group]
    scheduler.update_from_output(output, runner.execute(output))
    # The burst has filled the last block of "b".
    assert new_block_ids(scheduler.schedule()) == {"a": None, "b": ([13], [14])}


def test_a_block_filled_by_the_known_token_is_cached_and_not_copied():
    scheduler, runner = make_decoding((7,))
    output = step(scheduler, runner, 3)
    assert counts(output) == {"a": 3}
    assert output.block_copies == []
    assert new_block_ids(output)["a"] == ([3],)
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert [block.block_hash is not None for block in blocks] == [True, True, False]


def test_blocks_filled_in_a_burst_are_cached_when_its_tokens_are_known():
    scheduler, runner = make_decoding((5,))
    output = scheduler.schedule(8)
    (blocks,) = scheduler.kv_cache_manager.get_blocks("a").blocks
    assert [block.block_hash is not None for block in blocks] == [True, False, False, False]
    scheduler.update_from_output(output, runner.execute(output))
    # 13 of 14 tokens are computed.
    assert [block.block_hash is not None for block in blocks] == [True, True, True, False]


STOP = continuation(range(5), 5)[4]


@pytest.mark.parametrize("knows_ends", [True, False])
@pytest.mark.parametrize(
    ("ends", "stop_reason"),
    [
        ({"params": {"stop_token_ids": [STOP]}}, STOP),
        ({"eos_token_ids": (STOP, 98)}, None),
        ({"eos_token_ids": (98, STOP)}, STOP),
    ],
)
def test_a_token_that_ends_a_request_ends_its_burst(knows_ends, ends, stop_reason):
    tokens = continuation(range(5), 12)
    assert STOP not in tokens[:4] and 98 not in tokens
    scheduler, runner = make_decoding(runner=FunctionRunner(knows_ends=knows_ends), **ends)
    output = scheduler.schedule(8)
    runner_output = runner.execute(output)
    assert len(runner_output.sampled_token_ids[0]) == (4 if knows_ends else 8)
    (result,) = scheduler.update_from_output(output, runner_output)
    assert result.new_token_ids == tokens[1:5]
    assert (result.finish_reason, result.stop_reason) == ("stop", stop_reason)
    scheduler.check_invariants()
    assert scheduler.make_stats().kv_cache_usage == 0
    assert scheduler.schedule().finished_req_ids == {"a"}
    # 9 of its 10 tokens are certainly computed: 2 blocks.
    add(scheduler, "b", [*range(5), *tokens[:5], 1])
    output = scheduler.schedule()
    assert output.scheduled_new_reqs[0].num_computed_tokens == 8


def test_other_requests_continue_when_one_ends_in_a_burst():
    tokens = continuation(range(5), 3)
    scheduler, runner = make_scheduler(), FunctionRunner()
    add(scheduler, "a", range(5), params={"stop_token_ids": [tokens[2]]})
    add(scheduler, "b", range(6))
    step(scheduler, runner)
    step(scheduler, runner, 8)
    assert list(scheduler.requests) == ["b"]
    step(scheduler, runner, 8)
    assert scheduler.requests["b"].all_token_ids[6:] == continuation(range(6), 17)


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 5])
def test_a_continuing_request_with_missing_tokens_raises(num_tokens):
    scheduler, _ = make_decoding()
    output = scheduler.schedule(4)
    with pytest.raises(InvariantError, match="from a burst and did not end; 4 were scheduled"):
        scheduler.update_from_output(output, answer({"a": [500 + i for i in range(num_tokens)]}))


def test_no_request_is_scheduled_again_before_its_burst_returns():
    scheduler, runner = make_decoding()
    output = scheduler.schedule(4)
    scheduler.check_invariants()
    assert counts(scheduler.schedule(4)) == {}
    scheduler.update_from_output(output, runner.execute(output))
    assert counts(scheduler.schedule(4)) == {"a": 4}


def test_a_window_moves_after_the_burst():
    scheduler, runner = make_decoding((8,), specs=(window(5),))
    output = step(scheduler, runner, 8)
    assert counts(output) == {"a": 8}
    (table,) = scheduler.kv_cache_manager.get_block_ids("a")
    # Token 8 sees 4 to 8, so block 0 was freed when the burst began.
    assert [block_id == 0 for block_id in table] == [True, False, False, False]
    step(scheduler, runner)
    (table,) = scheduler.kv_cache_manager.get_block_ids("a")
    # Token 16 sees 12 to 16.
    assert [block_id == 0 for block_id in table] == [True, True, True, False, False]


CHANGES = [
    {"presence_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"bad_words": ["x"]},
    {"allowed_token_ids": [1]},
    {"logit_bias": {1: 1.0}},
]


@pytest.mark.parametrize("params", [*CHANGES, {"min_tokens": 3}], ids=str)
def test_requests_with_changed_logits_can_be_in_bursts(params):
    scheduler, runner = make_decoding(params=params)
    assert step(scheduler, runner, 8).num_decode_steps == 8


@pytest.mark.parametrize("params", CHANGES, ids=str)
def test_old_runners_change_logits_only_in_single_steps(params):
    scheduler, runner = make_decoding(params=params, bursts_change_logits=False)
    add(scheduler, "b", 5)
    step(scheduler, runner)
    assert step(scheduler, runner, 8).num_decode_steps == 1
    scheduler.finish_requests(["a"])
    assert step(scheduler, runner, 8).num_decode_steps == 8


def test_old_runners_use_single_steps_below_min_tokens():
    scheduler, runner = make_decoding(params={"min_tokens": 3}, bursts_change_logits=False)
    # One token is there; the next two samples are below min_tokens.
    assert [step(scheduler, runner, 4).num_decode_steps for _ in range(3)] == [1, 1, 4]


def test_logprobs_that_the_host_selects_prevent_bursts():
    scheduler, runner = make_decoding(params={"logprobs": MAX_LOGPROBS + 1})
    assert step(scheduler, runner, 8).num_decode_steps == 1
    scheduler, runner = make_decoding(params={"logprobs": MAX_LOGPROBS})
    assert step(scheduler, runner, 8).num_decode_steps == 8


def test_a_pooled_request_is_never_in_a_burst():
    scheduler, _ = make_decoding(max_num_batched_tokens=8)
    add(scheduler, "pooled", range(50, 58), is_pooled=True)
    assert scheduler.schedule(8).num_scheduled_tokens == {"a": 1, "pooled": 7}
    # Only its last token is left.
    assert scheduler.schedule(8).num_decode_steps == 1
