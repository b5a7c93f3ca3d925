"""The memory of evicted hashes: bounded, and able to say what was gone when."""

from paxkv.kv_cache.observers.evicted_hashes import EvictedHashes


def test_a_hash_is_known_as_evicted_after_it_was_and_not_before():
    evicted = EvictedHashes()
    evicted.add([b"a"])
    evicted.add([b"b", b"c"])
    assert evicted.num_evicted == 3
    assert [evicted.contains(b"b", before=moment) for moment in (0, 1, 2, 3)] == [
        False,
        False,
        True,
        True,
    ]
    assert not evicted.contains(b"d", before=3)


def test_the_oldest_are_forgotten_and_the_clock_runs_on():
    evicted = EvictedHashes(max_hashes=2)
    evicted.add([b"a", b"b", b"c"])
    assert not evicted.contains(b"a", before=3)
    assert evicted.contains(b"c", before=3)
    assert not evicted.contains(b"c", before=2)


def test_cleared_memory_knows_nothing_and_learns_again():
    evicted = EvictedHashes()
    evicted.add([b"a"])
    evicted.clear()
    assert not evicted.contains(b"a", before=1)
    evicted.add([b"a"])
    assert evicted.contains(b"a", before=2)
    assert not evicted.contains(b"a", before=1)
