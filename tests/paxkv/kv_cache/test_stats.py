"""Prefix cache numbers: totals, a window of requests, and separate counts of resumed ones."""

from hypothesis import given
from hypothesis import strategies as st

from paxkv.kv_cache.stats import CachingMetrics, PrefixCacheStats
from tests.paxkv.kv_cache.cache_fakes import make_manager, run_alone


def test_resumed_requests_are_counted_separately():
    stats = PrefixCacheStats()
    stats.record(num_tokens=10, num_hits=4, is_resumed=False)
    stats.record(num_tokens=20, num_hits=16, is_resumed=True)
    assert (stats.num_queries, stats.num_hits) == (10, 4)
    assert (stats.num_preempted_queries, stats.num_preempted_hits) == (20, 16)
    assert (stats.recent.num_queries, stats.recent.num_hits) == (10, 4)


def test_the_oldest_request_leaves_the_window():
    window = CachingMetrics(max_recent_requests=2)
    window.observe(100, 100)
    window.observe(10, 0)
    assert (window.num_queries, window.num_hits) == (110, 100)
    window.observe(30, 20)
    assert (window.num_queries, window.num_hits) == (40, 20)


def test_a_reset_cache_starts_a_new_window_and_keeps_the_totals():
    stats = PrefixCacheStats()
    stats.record(num_tokens=10, num_hits=4, is_resumed=False)
    stats.on_reset()
    assert stats.num_queries == 10
    assert (stats.recent.num_queries, stats.recent.num_hits) == (0, 0)


@given(
    size=st.integers(1, 5),
    requests=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=20),
)
def test_the_window_is_the_sum_of_the_last_requests(size, requests):
    window = CachingMetrics(max_recent_requests=size)
    for queries, hits in requests:
        window.observe(queries, hits)
    assert window.num_queries == sum(queries for queries, _ in requests[-size:])
    assert window.num_hits == sum(hits for _, hits in requests[-size:])


def test_without_look_ups_the_hit_rate_is_0():
    for enable_caching, skips in ((False, False), (True, True)):
        manager = make_manager(enable_caching=enable_caching)
        run_alone(manager, "a", range(9), skip_reading_prefix_cache=skips)
        assert manager.prefix_cache_stats.num_queries == 0
