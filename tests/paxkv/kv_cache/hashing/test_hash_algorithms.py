"""The hash algorithms: their bytes as documented, and no two inputs with the same bytes."""

import hashlib
import itertools
import struct

import cbor2
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from paxkv.kv_cache.hashing.hash_algorithms import PackedBytesAlgorithm, get_hash_algorithm

ALGORITHMS = ("sha256", "sha256_cbor", "xxhash")
PARENT = bytes(range(32))


def one_hash(algorithm, tokens, keys=(), parent=PARENT):
    (block_hash,) = get_hash_algorithm(algorithm).hash_chain(
        parent, tokens, len(tokens), [tuple(keys)]
    )
    return block_hash


def test_sha256_covers_parent_and_little_endian_tokens():
    expected = []
    for parent, tokens in ((PARENT, (1, 2)), (None, (2**31 - 1, 0))):
        data = (expected[-1] if parent is None else parent) + struct.pack("<ii", *tokens)
        expected.append(hashlib.sha256(data).digest())
    algorithm = get_hash_algorithm("sha256")
    assert algorithm.hash_chain(PARENT, [1, 2, 2**31 - 1, 0], 2, None) == expected


def test_xxhash_is_xxh3_128_of_the_same_bytes():
    expected = xxhash.xxh3_128_digest(PARENT[:16] + struct.pack("<ii", 1, 2))
    algorithm = get_hash_algorithm("xxhash")
    assert algorithm.hash_chain(PARENT[:16], [1, 2], 2, None) == [expected]


def test_the_cbor_hash_equals_sha256_of_handwritten_cbor():
    """The bytes are written by hand from RFC 8949, so that the format itself is tested."""
    root = hashlib.sha256(b"\x61s").digest()  # text of length 1
    algorithm = get_hash_algorithm("sha256_cbor")
    assert algorithm.root_hash("s", 16) == root
    # [bytes(32), [1, 24, 500], null]
    message = b"\x83\x58\x20" + root + b"\x83\x01\x18\x18\x19\x01\xf4" + b"\xf6"
    first = hashlib.sha256(message).digest()
    # [bytes(32), [1, 24, 500], [["salt", "t"]]]
    keys = b"\x81\x82\x64salt\x61t"
    salted = hashlib.sha256(message[:-1] + keys).digest()
    tokens = [1, 24, 500]
    assert algorithm.hash_chain(root, tokens, 3, None) == [first]
    assert algorithm.hash_chain(root, tokens, 3, [(("salt", "t"),)]) == [salted]


def test_the_cbor_hash_with_all_keys_equals_the_documented_arrays():
    keys = [("lora", "l"), ("mm", "img", -3), ("salt", "t")]
    message = cbor2.dumps([PARENT, [5, 6], [list(key) for key in keys]], canonical=True)
    assert one_hash("sha256_cbor", [5, 6], keys) == hashlib.sha256(message).digest()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_different_extra_keys_give_different_hashes(algorithm):
    key_lists = [
        (),
        (("salt", "a"),),
        (("lora", "a"),),
        (("lora", "a"), ("salt", "a")),
        (("salt", ""),),
        (("lora", ""),),
        (("mm", "a", 0),),
        (("mm", "a", 1),),
        (("mm", "a", -1),),
        (("mm", "a", 0), ("mm", "b", 1)),
        (("mm", "ab", 0), ("mm", "", 1)),
        (("mm", "a", 0), ("mm", "b", 1), ("mm", "", 2)),
        (("mm", "a", 0, "mm", "b", 1),),
        (("salt", "\0" * 32),),
    ]
    hashes = {one_hash(algorithm, [1, 2], keys) for keys in key_lists}
    assert len(hashes) == len(key_lists)


@pytest.mark.parametrize("algorithm", ["sha256", "xxhash"])
def test_tokens_cannot_imitate_extra_keys(algorithm):
    """Seven tokens have the bytes of two tokens and a salt; only the chain's root differs."""
    hashed = []
    spy = PackedBytesAlgorithm(lambda data: hashed.append(data) or b"")
    spy.hash_chain(b"", [1, 2], 2, [(("salt", "aa"),)])
    posing = list(struct.unpack("<7i", hashed[0]))
    real = get_hash_algorithm(algorithm)
    honest, forged = (
        real.hash_chain(real.root_hash("s", len(tokens)), tokens, len(tokens), keys)
        for tokens, keys in (([1, 2], [(("salt", "aa"),)]), (posing, None))
    )
    assert honest != forged
    # With the same root, the hashes would be equal.
    assert one_hash(algorithm, [1, 2], [("salt", "aa")]) == one_hash(algorithm, posing)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_equal_keys_of_neighboring_blocks_are_hashed_in_both(algorithm):
    """Keys are encoded once per run of equal keys; the next run must not use them."""
    chain = get_hash_algorithm(algorithm).hash_chain
    lora, plain = (("lora", "l"),), ()
    for pattern in itertools.product([lora, plain], repeat=3):
        parent, one_by_one = PARENT, []
        for block_idx, keys in enumerate(pattern):
            tokens = [2 * block_idx, 2 * block_idx + 1]
            (parent,) = chain(parent, tokens, 2, [keys])
            one_by_one.append(parent)
        assert chain(PARENT, [0, 1, 2, 3, 4, 5], 2, list(pattern)) == one_by_one


KEYS = st.lists(
    st.tuples(st.sampled_from(["lora", "salt"]), st.text(max_size=3))
    | st.tuples(st.just("mm"), st.text(max_size=3), st.integers(-2, 2)),
    max_size=3,
)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@given(
    first=st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=2), KEYS),
    second=st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=2), KEYS),
)
def test_hashes_are_equal_only_for_equal_inputs(algorithm, first, second):
    assert (one_hash(algorithm, *first) == one_hash(algorithm, *second)) == (first == second)


def test_a_token_id_above_four_bytes_raises():
    with pytest.raises(OverflowError):
        one_hash("sha256", [2**31])
