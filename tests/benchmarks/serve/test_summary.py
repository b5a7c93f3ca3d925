"""Figures of a load, against figures by hand."""

import pytest

from benchmarks.serve.request_record import RequestRecord
from benchmarks.serve.summary import summarize

# Sent at 1 s; tokens at 1.1, 1.2 and 1.4 s; one token more than pieces.
FIRST = RequestRecord(
    due_s=0.5,
    sent_s=1.0,
    chunk_times_s=(1.1, 1.2, 1.4),
    end_s=1.5,
    num_prompt_tokens=10,
    num_output_tokens=4,
    counted_by="usage",
    num_asked_tokens=4,
)
SECOND = RequestRecord(
    due_s=2.0,
    sent_s=2.0,
    chunk_times_s=(2.3,),
    end_s=2.4,
    num_prompt_tokens=20,
    num_output_tokens=1,
    counted_by="usage",
    num_asked_tokens=8,
)
# Some of it came, then it broke.
FAILED = RequestRecord(
    due_s=0.0, sent_s=0.0, chunk_times_s=(4.0,), end_s=5.0, num_asked_tokens=4, error="it broke"
)


def test_latencies_are_those_by_hand() -> None:
    figures = summarize([FIRST, SECOND], {}, has_arrivals=True).figures
    assert figures["ttft_ms_mean"] == pytest.approx(200)
    assert figures["ttft_ms_p50"] == pytest.approx(200)
    assert figures["ttft_ms_p90"] == pytest.approx(280)  # 100 + 0.9 * (300 - 100)
    assert figures["tpot_ms_mean"] == pytest.approx(100)  # (1.4 - 1.1) / 3, of the first alone
    assert figures["itl_ms_mean"] == pytest.approx(150)
    assert figures["e2e_ms_mean"] == pytest.approx(350)
    assert figures["client_wait_ms_mean"] == pytest.approx(250)
    # 1.4 s from the first sending to the last end.
    assert figures["output_tokens_per_s"] == pytest.approx(5 / 1.4)
    assert figures["total_tokens_per_s"] == pytest.approx(35 / 1.4)
    assert figures["requests_per_s"] == pytest.approx(2 / 1.4)


def test_failed_requests_are_counted_and_in_no_latency() -> None:
    summary = summarize([FIRST, FAILED, SECOND], {"ttft": 1e9}, has_arrivals=True)
    assert (summary.num_failed, dict(summary.errors)) == (1, {"it broke": 1})
    assert summary.figures["num_failed"] == 1
    assert summary.figures["ttft_ms_mean"] == pytest.approx(200)
    # They take their time, and are not good.
    assert summary.figures["duration_s"] == 5.0
    assert summary.figures["goodput_requests_per_s"] == pytest.approx(2 / 5)
    assert summary.figures["goodput_percent"] == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("bounds", "num_good"),
    [
        ({"ttft": 150}, 1),
        ({"ttft": 350}, 2),
        ({"ttft": 350, "tpot": 99}, 1),
        ({"ttft": 350, "tpot": 101, "e2e": 350}, 1),
        ({"ttft": 50}, 0),
    ],
)
def test_goodput_counts_requests_that_keep_all_bounds(bounds: dict, num_good: int) -> None:
    figures = summarize([FIRST, SECOND], bounds, has_arrivals=True).figures
    assert figures["goodput_percent"] == pytest.approx(50 * num_good)
