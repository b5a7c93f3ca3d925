"""Rows name the load, tables show medians, and what failed is below them."""

from benchmarks.serve.command_line import make_parser
from benchmarks.serve.report import report, result_rows
from benchmarks.serve.request_record import RequestRecord
from benchmarks.serve.summary import LoadSummary, summarize


def summary_of(ttft_s: float, *, num_asked: int = 1, error: str | None = None) -> LoadSummary:
    answered = RequestRecord(
        due_s=0.0,
        sent_s=0.0,
        chunk_times_s=(ttft_s,),
        end_s=1.0,
        num_output_tokens=1,
        num_asked_tokens=num_asked,
    )
    failed = RequestRecord(due_s=0.0, sent_s=0.0, end_s=1.0, num_asked_tokens=1, error=error)
    return summarize([answered, *[failed] * (error is not None)], {}, has_arrivals=False)


def test_tables_show_medians_of_repetitions() -> None:
    arguments = make_parser("").parse_args(["--model", "m"])
    summaries = [summary_of(ttft_s) for ttft_s in (0.2, 0.1, 0.4)]
    rows = result_rows(arguments, summaries)
    (row,) = (row for row in rows if row.metric == "ttft_ms_p50")
    assert list(row.values) == [200.0, 100.0, 400.0]
    text = report(rows, summaries)
    assert "Medians of 3 repetitions." in text
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["time to first token (TTFT)", "200", "200", "200", "200"] in lines
    assert ["requests_per_s", "1"] in lines
    assert "ITL" not in text


def test_failures_and_short_outputs_are_below_the_tables() -> None:
    arguments = make_parser("").parse_args(["--model", "m"])
    summaries = [summary_of(0.1, num_asked=9, error="it broke")]
    text = report(result_rows(arguments, summaries), summaries)
    assert "1 of 2 requests FAILED:\n    1 x it broke" in text
    assert "ended before the length that was asked for: 1;" in text
    assert "pieces of the stream (1 requests)" in text
