"""Buckets hold every size, and are few."""

from paxkv.runner.shapes.bucket_sizes import (
    copy_buckets,
    decode_buckets,
    share_programs,
    token_buckets,
)


def test_token_buckets_are_powers_of_two_and_the_largest_step():
    assert token_buckets(48) == (16, 32, 48)
    assert token_buckets(64) == (16, 32, 64)
    assert token_buckets(3) == (3,)
    assert token_buckets(1) == (1,)


def test_steps_that_verify_drafts_have_a_bucket_of_eight_tokens():
    assert token_buckets(48, verifies_drafts=True) == (8, 16, 32, 48)
    assert token_buckets(3, verifies_drafts=True) == (3,)


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


def test_copy_buckets_are_few_and_the_largest_is_exact():
    assert copy_buckets(100) == (8, 64, 100)
    assert copy_buckets(512) == (8, 64, 512)
    assert copy_buckets(3) == (3,)
