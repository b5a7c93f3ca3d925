"""Latency, throughput and goodput of one load."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from benchmarks.serve.request_record import RequestRecord

# Latency -> its name in the table, in the order of the table.
LATENCIES = {
    "ttft_ms": "time to first token (TTFT)",
    "tpot_ms": "time per output token (TPOT)",
    "itl_ms": "inter-token latency (ITL)",
    "e2e_ms": "end to end (E2E)",
    "client_wait_ms": "wait at the client",
}
STATISTICS = ("mean", "p50", "p90", "p99")
# Latencies that --goodput may bound; a request has one value of each.
BOUNDED = ("ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadSummary:
    """One load.

    Args:
        figures: Name with unit, such as `ttft_ms_p99` -> value, without unknown values.
        errors: Reason of failures -> number of requests, in order of time.
        num_ended_early: Answered requests whose output is shorter than requested.
        counted_by: How output tokens were counted -> number of requests.
    """

    num_requests: int
    figures: Mapping[str, float]
    errors: Mapping[str, int]
    num_ended_early: int
    counted_by: Mapping[str, int]

    @property
    def num_failed(self) -> int:
        return sum(self.errors.values())


def summarize(
    records: Sequence[RequestRecord], goodput: Mapping[str, float], *, has_arrivals: bool
) -> LoadSummary:
    """The figures of a load. Latencies exclude failed requests.

    Args:
        goodput: Bounds in milliseconds by name, see `BOUNDED`; may be empty.
        has_arrivals: Requests arrived at a rate; otherwise no request waited at the client.
    """
    answered = [record for record in records if record.error is None]
    failed = sorted((r for r in records if r.error is not None), key=lambda r: r.end_s)
    figures: dict[str, float] = {"num_requests": len(records), "num_failed": len(failed)}
    if answered:
        figures |= _rates(records, answered)
        if goodput:
            num_good = sum(_is_good(record, goodput) for record in answered)
            figures["goodput_requests_per_s"] = num_good / figures["duration_s"]
            figures["goodput_percent"] = 100 * num_good / len(records)
        for name, times_s in _latencies(answered).items():
            if has_arrivals or name != "client_wait_ms":
                figures |= _statistics(name, times_s)
    return LoadSummary(
        num_requests=len(records),
        figures=figures,
        errors=Counter(record.error for record in failed),
        num_ended_early=sum(r.num_output_tokens < r.num_asked_tokens for r in answered),
        counted_by=Counter(record.counted_by for record in answered),
    )


def _rates(records: Sequence[RequestRecord], answered: Sequence[RequestRecord]) -> dict[str, float]:
    duration_s = max(r.end_s for r in records) - min(r.sent_s for r in records)
    num_output_tokens = sum(r.num_output_tokens for r in answered)
    rates = {
        "duration_s": duration_s,
        "requests_per_s": len(answered) / duration_s,
        "num_output_tokens": num_output_tokens,
        "output_tokens_per_s": num_output_tokens / duration_s,
    }
    num_prompt_tokens = [r.num_prompt_tokens for r in answered]
    if None not in num_prompt_tokens:
        rates["num_prompt_tokens"] = sum(num_prompt_tokens)
        rates["total_tokens_per_s"] = (sum(num_prompt_tokens) + num_output_tokens) / duration_s
    return rates


def _latencies(answered: Sequence[RequestRecord]) -> dict[str, list[float]]:
    return {
        "ttft_ms": [r.ttft_s for r in answered],
        "tpot_ms": [r.tpot_s for r in answered if r.tpot_s is not None],
        "itl_ms": [itl_s for r in answered for itl_s in r.itls_s],
        "e2e_ms": [r.e2e_s for r in answered],
        "client_wait_ms": [r.sent_s - r.due_s for r in answered],
    }


def _statistics(name: str, times_s: Sequence[float]) -> dict[str, float]:
    if not times_s:
        return {}
    times_ms = 1e3 * np.asarray(times_s)
    percentiles = np.percentile(times_ms, [50, 90, 99])
    values = (float(times_ms.mean()), *map(float, percentiles))
    return {f"{name}_{statistic}": v for statistic, v in zip(STATISTICS, values, strict=True)}


def _is_good(record: RequestRecord, bounds_ms: Mapping[str, float]) -> bool:
    """True if the request meets all bounds. A request with one token meets any bound on TPOT."""
    times_s = {"ttft": record.ttft_s, "tpot": record.tpot_s or 0.0, "e2e": record.e2e_s}
    return all(1e3 * times_s[name] <= bound_ms for name, bound_ms in bounds_ms.items())
