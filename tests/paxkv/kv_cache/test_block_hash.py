"""Block hashes: the same exactly when all tokens up to the block's end are the same."""

import hashlib
import struct

from paxkv.kv_cache.block_hash import (
    BlockHasher,
    get_block_hash,
    get_group_id,
    hash_block_tokens,
    make_block_hash_with_group_id,
)


def hashes(token_ids, *, block_size=4, seed="s", cache_salt=None):
    block_hashes = []
    BlockHasher(block_size=block_size, seed=seed).extend(block_hashes, token_ids, cache_salt)
    return block_hashes


def test_hash_is_sha256_of_parent_and_little_endian_tokens():
    parent = bytes(range(32))
    expected = parent + struct.pack("<I", 3) + struct.pack("<qqq", 1, 2, 2**31)
    assert hash_block_tokens(parent, [1, 2, 2**31]) == hashlib.sha256(expected).digest()


def test_only_full_blocks_are_hashed():
    assert [len(hashes(list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_different_token_changes_its_block_and_every_later_one():
    first = hashes(list(range(12)))
    second = hashes([*range(5), 99, *range(6, 12)])
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]
    assert len(set(first + second)) == 5


def test_extending_token_by_token_gives_the_hashes_of_the_whole():
    token_ids = [7, 3, 3, 9, 1, 0, 2, 2, 5]
    hasher = BlockHasher(block_size=4, seed="s")
    block_hashes = []
    for length in range(1, len(token_ids) + 1):
        hasher.extend(block_hashes, token_ids[:length], None)
    assert block_hashes == hashes(token_ids)


def test_cache_salt_separates_every_block_of_tenants():
    plain, salted, other = (hashes(list(range(8)), cache_salt=s) for s in (None, "a", "b"))
    assert len({*plain, *salted, *other}) == 6
    assert hashes(list(range(8)), cache_salt="a") == salted
    assert hashes(list(range(8)), cache_salt="") != plain


def test_extra_keys_cannot_be_confused_with_each_other():
    parent = bytes(32)
    keys = [(), ("",), ("ab",), ("a", "b"), ("", "ab"), ("ab", "")]
    assert len({hash_block_tokens(parent, [1], key) for key in keys}) == len(keys)


def test_a_salt_that_is_no_valid_unicode_is_hashed_too():
    assert hashes([1, 2, 3, 4], cache_salt="\ud800") != hashes([1, 2, 3, 4])


def test_equal_seeds_agree_and_engines_without_a_seed_do_not():
    assert (
        BlockHasher(block_size=4, seed="x").none_hash
        == BlockHasher(block_size=8, seed="x").none_hash
    )
    assert hashes([1, 2, 3, 4], seed="x") != hashes([1, 2, 3, 4], seed="y")
    assert hashes([1, 2, 3, 4], seed=None) != hashes([1, 2, 3, 4], seed=None)


def test_group_id_travels_with_the_hash():
    block_hash = hashes([1, 2, 3, 4])[0]
    keys = [make_block_hash_with_group_id(block_hash, group_id) for group_id in (0, 1, 70000)]
    assert len(set(keys)) == 3
    assert [get_group_id(key) for key in keys] == [0, 1, 70000]
    assert {get_block_hash(key) for key in keys} == {block_hash}
