"""Figures of a load, compared with figures by hand."""

import pytest

from benchmarks.serve.request_record import RequestRecord
from benchmarks.serve.summary import summarize


def record(*times: float | tuple, **fields: int | str) -> RequestRecord:
    names = ("due_s", "sent_s", "chunk_times_s", "end_s")
    return RequestRecord(num_asked_tokens=4, **dict(zip(names, times, strict=True)), **fields)


# One token more than pieces.
FIRST = record(0.5, 1.0, (1.1, 1.2, 1.4), 1.5, num_prompt_tokens=10, num_output_tokens=4)
SECOND = record(2.0, 2.0, (2.3,), 2.4, num_prompt_tokens=20, num_output_tokens=1)
# It failed after its first token.
FAILED = record(0.0, 0.0, (4.0,), 5.0, error="it broke")


def test_latencies_equal_a_calculation_by_hand() -> None:
    summary = summarize([FIRST, SECOND], {}, has_arrivals=True)
    wanted = {
        "ttft_ms_mean": 200,
        "ttft_ms_p50": 200,
        "ttft_ms_p90": 280,  # 100 + 0.9 * (300 - 100)
        "tpot_ms_mean": 100,  # (1.4 - 1.1) / 3, of the first alone
        "itl_ms_mean": 150,
        "e2e_ms_mean": 350,
        "client_wait_ms_mean": 250,
        # 1.4 s from the first sending to the last end.
        "output_tokens_per_s": 5 / 1.4,
        "total_tokens_per_s": 35 / 1.4,
        "requests_per_s": 2 / 1.4,
    }
    assert {name: summary.figures[name] for name in wanted} == pytest.approx(wanted)
    assert summary.num_ended_early == 1


def test_failed_requests_are_counted_and_in_no_latency() -> None:
    summary = summarize([FIRST, FAILED, SECOND], {"ttft": 1e9}, has_arrivals=True)
    assert (summary.num_failed, dict(summary.errors)) == (1, {"it broke": 1})
    assert summary.figures["ttft_ms_mean"] == pytest.approx(200)
    # They count in the duration and not in the goodput.
    assert summary.figures["duration_s"] == 5.0
    assert summary.figures["goodput_percent"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("bounds", "num_good"),
    [
        ({"ttft": 350, "tpot": 99}, 1),
        ({"ttft": 350, "tpot": 101, "e2e": 350}, 1),
        ({"ttft": 350, "tpot": 101}, 2),
    ],
)
def test_goodput_counts_requests_that_keep_all_bounds(bounds: dict, num_good: int) -> None:
    figures = summarize([FIRST, SECOND], bounds, has_arrivals=True).figures
    assert figures["goodput_percent"] == pytest.approx(50 * num_good)
