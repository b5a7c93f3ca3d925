"""The clockwork of the CPU half: calls in turn, pinned, with a floor that reads what it says."""

import numpy as np

from benchmarks.ops.cpu_timing import SequentialReads, fastest, ratios, sample_in_turn


def test_calls_take_turns_after_a_first_round_that_is_not_counted():
    order = []
    calls = {name: lambda i, name=name: order.append((name, i)) for name in ("a", "b")}
    seconds = sample_in_turn(calls, num_data_sets=2, num_samples=3)
    one_round = [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert order == one_round * 4
    assert {name: len(samples) for name, samples in seconds.items()} == {"a": 3, "b": 3}


def test_reads_go_round_the_buffer():
    reads = SequentialReads(num_bytes=4 * 40)
    reads._buffer[:] = np.arange(40)
    call = reads.call(num_bytes=4 * 10, read=lambda part: (part[0], len(part)))
    assert [call(0) for _ in range(5)] == [(10, 10), (20, 10), (30, 10), (0, 10), (10, 10)]


def test_the_floor_is_the_faster_reader():
    seconds = {"slow": [3.0, 3.0], "fast": [1.0, 9.0, 1.0]}
    assert fastest(seconds, ("slow", "fast", "absent")) == [1.0, 9.0, 1.0]
    assert ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]
