"""Buckets cover every step and are few."""

import dataclasses

import pytest

from paxkv.errors import InvariantError
from paxkv.runner.programs.bucketing import (
    SamplerShape,
    StepBuckets,
    copy_buckets,
    decode_buckets,
    share_programs,
    token_buckets,
)


def make_buckets(max_num_batched_tokens=48, max_num_seqs=6, num_groups=1, **settings):
    return StepBuckets(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_decode_burst=8,
        num_groups=num_groups,
        max_blocks_per_req=5,
        max_model_len=5 * 8,
        **settings,
    )


def test_token_buckets_are_powers_of_two_and_the_largest_step():
    assert token_buckets(48) == (16, 32, 48)
    assert token_buckets(64) == (16, 32, 64)
    assert token_buckets(3) == (3,)
    assert token_buckets(1) == (1,)


def test_decode_buckets_are_one_powers_of_two_some_halfway_and_all_requests():
    assert decode_buckets(20) == (1, 8, 16, 20)
    assert decode_buckets(24) == (1, 8, 16, 24)
    assert decode_buckets(64) == (1, 8, 16, 24, 32, 48, 64)
    assert decode_buckets(256) == (1, 8, 16, 24, 32, 48, 64, 128, 256)
    assert decode_buckets(3) == (1, 3)
    assert decode_buckets(1) == (1,)


def test_a_program_holds_buckets_up_to_four_times_its_smallest():
    assert share_programs((1, 8, 16, 24, 32, 48, 64)) == ((1,), (8,), (16, 24, 32, 48, 64))
    assert share_programs((16, 32, 64, 128, 256, 512)) == ((16, 32, 64), (128, 256, 512))
    assert share_programs((1, 8, 16, 20)) == ((1,), (8, 16, 20))
    assert share_programs((2, 8)) == ((2, 8),)
    assert share_programs((2, 9)) == ((2,), (9,))
    assert share_programs((7,)) == ((7,),)


def test_a_single_row_has_a_program_of_its_own():
    assert share_programs((1, 3)) == ((1,), (3,))
    assert share_programs((1,)) == ((1,),)


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 64), (2048, 256), (48, 6), (5, 9)])
def test_shared_programs_compute_what_programs_of_their_own_would(budget, max_num_seqs):
    settings = {"max_num_batched_tokens": budget, "max_num_seqs": max_num_seqs}
    own, shared = make_buckets(**settings), make_buckets(**settings, shares_programs=True)
    for num_tokens in range(1, budget + 1):
        step = shared.shape_for(num_tokens)
        assert step in shared.step_shapes and step.num_tokens >= num_tokens
        wanted = own.shape_for(num_tokens).num_computed(num_tokens)
        assert step.num_computed(num_tokens) == wanted
    for num_reqs in range(1, max_num_seqs + 1):
        burst = shared.burst_shape_for(num_reqs)
        assert burst in shared.burst_shapes and burst.num_reqs >= num_reqs
        wanted = own.burst_shape_for(num_reqs).num_computed(num_reqs)
        assert burst.num_computed(num_reqs) == wanted


def test_shared_programs_are_ten_by_default():
    buckets = make_buckets(max_num_batched_tokens=512, max_num_seqs=64, shares_programs=True)
    assert len(buckets.largest_first) == 10


@pytest.mark.parametrize(("budget", "max_num_seqs"), [(512, 64), (2048, 256)])
def test_programs_are_few(budget, max_num_seqs):
    buckets = make_buckets(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
    # Those with a model in them take seconds to compile, the others no more than one.
    assert len(buckets.step_shapes) + len(buckets.burst_shapes) <= 17
    assert len(buckets.largest_first) <= 23
    assert len(set(buckets.largest_first)) == len(buckets.largest_first)


@pytest.mark.parametrize("num_tokens", range(1, 49))
def test_step_gets_smallest_shape_that_holds_its_tokens_and_requests(num_tokens):
    buckets = make_buckets()
    shape = buckets.shape_for(num_tokens)
    assert num_tokens <= shape.num_tokens < 2 * num_tokens or shape.num_tokens == 16
    # As many requests as tokens may be scheduled, up to max_num_seqs.
    assert shape.num_reqs == shape.num_logits >= min(num_tokens, 6)
    assert shape.max_blocks_per_req == 5
    assert shape in buckets.step_shapes


@pytest.mark.parametrize("num_reqs", range(1, 7))
def test_burst_gets_smallest_shape_that_holds_its_requests(num_reqs):
    buckets = make_buckets()
    shape = buckets.burst_shape_for(num_reqs)
    assert num_reqs <= shape.num_reqs
    assert not any(num_reqs <= s.num_reqs < shape.num_reqs for s in buckets.burst_shapes)
    assert (shape.max_steps, shape.max_blocks_per_req) == (8, 5)


def test_largest_shapes_are_the_budget_and_all_requests():
    step, prompt_step, burst, copies, sampler, row = make_buckets().largest
    assert (step.num_tokens, burst.num_reqs, copies.num_copies) == (48, 6, 6)
    assert prompt_step == dataclasses.replace(step, has_prompt_logprobs=True)
    assert (sampler, row) == (make_buckets().sampler_shape, make_buckets().row_shape)


@pytest.mark.parametrize(
    ("max_num_seqs", "chunk_rows", "expected"), [(6, 4, 4), (6, 8, 6), (6, None, 6)]
)
def test_sampler_has_a_row_for_every_request_and_no_chunk_is_larger(
    max_num_seqs, chunk_rows, expected
):
    buckets = make_buckets(max_num_seqs=max_num_seqs, sampled_chunk_rows=chunk_rows)
    assert buckets.sampler_shape == SamplerShape(
        num_rows=max_num_seqs, max_model_len=40, chunk_rows=expected
    )


@pytest.mark.parametrize("num_tokens", [0, 49])
def test_step_outside_the_budget_is_a_bug(num_tokens):
    with pytest.raises(InvariantError, match=f"1 to 48 tokens, got {num_tokens}"):
        make_buckets().shape_for(num_tokens)


@pytest.mark.parametrize("num_reqs", [0, 7])
def test_more_requests_than_may_run_are_a_bug(num_reqs):
    with pytest.raises(InvariantError, match=f"1 to 6 requests, got {num_reqs}"):
        make_buckets().burst_shape_for(num_reqs)


def test_copy_buckets_are_few_and_the_largest_is_exact():
    assert copy_buckets(100) == (8, 64, 100)
    assert copy_buckets(512) == (8, 64, 512)
    assert copy_buckets(3) == (3,)


def test_copies_get_the_smallest_shape_that_holds_one_a_request_and_group():
    buckets = make_buckets(max_num_seqs=6, num_groups=2)
    counts = {n: buckets.copy_shape_for(n).num_copies for n in (1, 8, 9, 12, 13)}
    assert counts == {1: 8, 8: 8, 9: 12, 12: 12, 13: 12}
    assert [shape.num_copies for shape in buckets.copy_shapes] == [8, 12]
