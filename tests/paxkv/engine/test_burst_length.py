"""Bursts grow while no request arrives, and are short if one arrives or a client streams."""

import pytest

from paxkv.engine.burst_length import MAX_BURST_S, MAX_STREAMED_BURST_S, BurstLength


def lengths(burst_length: BurstLength, num: int, *, is_streamed: bool = False) -> list[int]:
    return [burst_length.next_length(is_streamed=is_streamed) for _ in range(num)]


def with_step_time(step_s: float, max_decode_burst: int = 8) -> BurstLength:
    burst_length = BurstLength(max_decode_burst)
    burst_length.record_burst(1, step_s)
    return burst_length


def test_first_burst_has_one_step_because_no_duration_is_known() -> None:
    burst_length = BurstLength(8)
    assert lengths(burst_length, 3) == [1, 1, 1]
    burst_length.record_burst(1, 0.001)
    assert lengths(burst_length, 1) == [8]


def test_length_doubles_while_no_request_arrives() -> None:
    assert lengths(with_step_time(0.001), 6) == [1, 2, 4, 8, 8, 8]
    assert lengths(with_step_time(0.001, max_decode_burst=5), 5) == [1, 2, 4, 5, 5]
    assert lengths(with_step_time(0.001, max_decode_burst=1), 3) == [1, 1, 1]


def test_arrival_resets_the_length_to_one_step() -> None:
    burst_length = with_step_time(0.001)
    lengths(burst_length, 5)
    burst_length.record_arrival()
    assert lengths(burst_length, 4) == [1, 2, 4, 8]


def test_duration_of_a_burst_is_limited() -> None:
    for step_s in (0.004, 0.013, 0.03, 1.0):
        quiet = lengths(with_step_time(step_s), 6)[-1]
        streamed = lengths(with_step_time(step_s), 6, is_streamed=True)[-1]
        assert quiet == max(1, min(8, int(MAX_BURST_S / step_s)))
        assert streamed == max(1, min(8, int(MAX_STREAMED_BURST_S / step_s)))


def test_expected_duration_falls_immediately_and_rises_slowly() -> None:
    burst_length = BurstLength(8)
    assert burst_length.expected_s(8) == 0.0
    burst_length.record_burst(4, 4 * 0.03)
    assert burst_length.expected_s(8) == pytest.approx(0.24)
    burst_length.record_burst(8, 8 * 0.01)
    assert burst_length.expected_s(8) == pytest.approx(0.08)
    burst_length.record_burst(8, 8 * 0.1)
    assert 0.2 < burst_length.expected_s(8) < 0.4


def test_step_duration_follows_slower_steps() -> None:
    burst_length = with_step_time(0.001)
    for _ in range(30):
        burst_length.record_burst(8, 8 * 0.1)
    assert lengths(burst_length, 5)[-1] == 2
