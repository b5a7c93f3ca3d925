"""The memory of evicted hashes: it is bounded, and knows the order of evictions."""

from paxkv.kv_cache.observers.evicted_hashes import EvictedHashes


def test_contains_is_true_only_after_the_eviction():
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


def test_the_oldest_hashes_are_dropped_and_the_clock_continues():
    evicted = EvictedHashes(max_hashes=2)
    evicted.add([b"a", b"b", b"c"])
    assert not evicted.contains(b"a", before=3)
    assert evicted.contains(b"c", before=3)
    assert not evicted.contains(b"c", before=2)


def test_cleared_memory_is_empty_and_records_new_hashes():
    evicted = EvictedHashes()
    evicted.add([b"a"])
    evicted.clear()
    assert not evicted.contains(b"a", before=1)
    evicted.add([b"a"])
    assert evicted.contains(b"a", before=2)
    assert not evicted.contains(b"a", before=1)
