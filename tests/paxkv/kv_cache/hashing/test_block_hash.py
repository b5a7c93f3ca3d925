"""Block hashes: equal exactly if all tokens up to the block's end are equal."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.errors import InvariantError
from paxkv.kv_cache.hashing.block_hash import (
    BlockHasher,
    BlockHashListWithBlockSize,
    get_block_hash,
    get_group_id,
    make_block_hash_with_group_id,
    make_block_hashes_with_group_id,
    with_block_size,
)
from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash")


def hashes(token_ids, *, block_size=4, seed="s", algorithm="sha256", **sources):
    block_hashes = []
    hasher = BlockHasher(block_size=block_size, seed=seed, algorithm=algorithm)
    hasher.extend(block_hashes, token_ids, ExtraKeySources(**sources) if sources else None)
    return block_hashes


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_full_blocks_are_hashed(algorithm):
    counts = [len(hashes(list(range(n)), algorithm=algorithm)) for n in (0, 3, 4, 7, 8)]
    assert counts == [0, 0, 1, 1, 2]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_different_token_changes_its_block_and_every_later_one(algorithm):
    first = hashes(list(range(12)), algorithm=algorithm)
    second = hashes([*range(5), 99, *range(6, 12)], algorithm=algorithm)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]
    assert len(set(first + second)) == 5


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=30)
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=30),
    steps=st.lists(st.integers(1, 9), min_size=30, max_size=30),
    salt=st.sampled_from([None, "a"]),
    lora=st.sampled_from([None, "b"]),
)
def test_hashes_do_not_depend_on_how_tokens_are_appended(algorithm, token_ids, steps, salt, lora):
    sources = ExtraKeySources(cache_salt=salt, lora_name=lora)
    hasher = BlockHasher(block_size=4, seed="s", algorithm=algorithm)
    block_hashes, length = [], 0
    for step in steps:
        length += step
        hasher.extend(block_hashes, token_ids[:length], sources)
    assert block_hashes == hashes(token_ids, algorithm=algorithm, cache_salt=salt, lora_name=lora)
    if salt is None and lora is None:
        # Sources without a key give the same hashes as no sources.
        assert block_hashes == hashes(token_ids, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_cache_salts_separate_all_blocks(algorithm):
    tokens = list(range(8))
    plain = hashes(tokens, algorithm=algorithm)
    salted, other = (hashes(tokens, algorithm=algorithm, cache_salt=s) for s in ("a", "b"))
    assert len({*plain, *salted, *other}) == 6
    assert hashes(tokens, algorithm=algorithm, cache_salt="a") == salted
    assert hashes(tokens, algorithm=algorithm, cache_salt="") != plain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_salt_with_invalid_unicode_is_hashed(algorithm):
    plain = hashes([1, 2, 3, 4], algorithm=algorithm)
    assert hashes([1, 2, 3, 4], algorithm=algorithm, cache_salt="\ud800") != plain


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_engines_agree_on_hashes_only_with_equal_seeds(algorithm):
    tokens = [1, 2, 3, 4]
    same, other, random, random_again = (
        hashes(tokens, algorithm=algorithm, seed=seed) for seed in ("x", "y", None, None)
    )
    assert hashes(tokens, algorithm=algorithm, seed="x") == same
    assert len({*same, *other, *random, *random_again}) == 4
    assert len(random[0]) == len(same[0]) == (16 if algorithm == "xxhash" else 32)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_different_block_sizes_give_different_hashes(algorithm):
    """The hashed bytes contain no number of tokens, so the root hash must depend on the size."""
    roots = {
        BlockHasher(block_size=size, seed="x", algorithm=algorithm).none_hash for size in (4, 8)
    }
    assert len(roots) == 2


def test_a_fixed_seed_gives_equal_hashes_in_another_process():
    program = (
        "from paxkv.kv_cache.hashing.block_hash import BlockHasher\n"
        "from paxkv.kv_cache.hashing.extra_keys import ExtraKeySources\n"
        "for algorithm in ('sha256', 'sha256_cbor', 'xxhash'):\n"
        "    out = []\n"
        "    hasher = BlockHasher(block_size=4, seed='fixed', algorithm=algorithm)\n"
        "    hasher.extend(out, list(range(8)), ExtraKeySources(cache_salt='t', lora_name='l'))\n"
        "    print(*(h.hex() for h in out))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).resolve().parents[4],
        # Python's string hashing differs between processes; block hashes must not depend on it.
        env={"PYTHONHASHSEED": "random", "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    expected = [
        " ".join(
            block_hash.hex()
            for block_hash in hashes(
                list(range(8)), seed="fixed", algorithm=algorithm, cache_salt="t", lora_name="l"
            )
        )
        for algorithm in ALGORITHMS
    ]
    assert result.stdout.splitlines() == expected


def test_a_key_contains_hash_and_group_id():
    block_hash = hashes([1, 2, 3, 4])[0]
    keys = [make_block_hash_with_group_id(block_hash, group_id) for group_id in (0, 1, 70000)]
    assert len(set(keys)) == 3
    assert [get_group_id(key) for key in keys] == [0, 1, 70000]
    assert {get_block_hash(key) for key in keys} == {block_hash}
    assert list(make_block_hashes_with_group_id([block_hash, b"x"], 1)) == [
        keys[1],
        make_block_hash_with_group_id(b"x", 1),
    ]


def test_a_larger_block_has_the_hash_of_its_last_small_block():
    small = [b"0", b"1", b"2", b"3", b"4"]
    merged = BlockHashListWithBlockSize(small, 16, 32)
    assert list(merged) == [b"1", b"3"]
    assert [merged[0], merged[1], merged[-1]] == [b"1", b"3", b"3"]
    assert (merged[:1], merged[1:], merged[::-1]) == ([b"1"], [b"3"], [b"3", b"1"])
    assert len(merged) == 2
    with pytest.raises(IndexError):
        merged[2]
    small.append(b"5")
    assert list(merged) == [b"1", b"3", b"5"]


def test_block_sizes_must_be_equal_or_a_multiple():
    small = [b"0", b"1", b"2"]
    assert with_block_size(small, 16, 16) is small
    assert list(with_block_size(small, 16, 48)) == [b"2"]
    for hash_block_size, block_size in ((16, 24), (16, 8)):
        with pytest.raises(InvariantError, match="multiple"):
            with_block_size(small, hash_block_size, block_size)


@given(
    first=st.lists(st.integers(0, 2), max_size=16),
    second=st.lists(st.integers(0, 2), max_size=16),
    scale=st.integers(1, 3),
)
def test_merged_hashes_are_equal_only_after_equal_tokens(first, second, scale):
    size = 2 * scale
    views = [with_block_size(hashes(tokens, block_size=2), 2, size) for tokens in (first, second)]
    for block_idx in range(min(len(first), len(second)) // size):
        end = (block_idx + 1) * size
        is_equal = views[0][block_idx] == views[1][block_idx]
        assert is_equal == (first[:end] == second[:end])
