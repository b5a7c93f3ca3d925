"""The cost of HTTP and text is the share of tokens per CPU-second that is lost on the way."""

import json
from pathlib import Path

import pytest

from benchmarks.engine.offline_engine import EngineRun
from benchmarks.engine.options import make_parser
from benchmarks.serve.http_cost import ServedRun, main, report, result_rows, server_flags


def offline_run(cpu_s: float) -> EngineRun:
    return EngineRun(
        token_ids=[[1] * 100], figures={}, wall_s=5.0, cpu_s=cpu_s, idle_wall_s=1.0, idle_cpu_s=0.0
    )


def served_run(server_cpu_s: float) -> ServedRun:
    return ServedRun(num_output_tokens=100, wall_s=6.0, server_cpu_s=server_cpu_s, engine_cpu_s=4.0)


@pytest.mark.parametrize(
    ("server_cpu_s", "cost", "verdict"), [(1, 20, "NOT under"), (0.5, 11.1, "under")]
)
def test_both_processes_count(server_cpu_s: float, cost: float, verdict: str) -> None:
    arguments = make_parser("x", "").parse_args([])
    rows = result_rows(arguments, [offline_run(4.0)], [served_run(server_cpu_s)])
    (row,) = (row for row in rows if row.metric == "cost_percent")
    assert row.median == pytest.approx(cost, abs=0.1)
    assert f"cost {cost:.1f} % of the tokens per CPU-second: {verdict} the 15 %" in report(rows)


def test_settings_become_flags() -> None:
    settings = {"block_size": 32, "batch_invariant": False, "async_scheduling": True}
    assert server_flags(settings) == [
        *("--block-size", "32"),
        "--no-batch-invariant",
        "--async-scheduling",
    ]


# About 30 s; run with `pytest -m slow tests/benchmarks/serve/test_http_cost.py`.
@pytest.mark.slow
def test_small_run_of_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "rows.jsonl"
    size = ("--model", "tiny", "--num-requests", "8", "--repetitions", "2")
    settings = ("--max-num-seqs", "8", "--set", "max_num_batched_tokens=64")
    # The tiny model's vocabulary is one token a byte.
    assert main([*size, *settings, "--out", str(out)]) == 0
    assert "HTTP and text cost" in capsys.readouterr().out
    rows = {row["metric"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["server_process_cpu_s"]["num_repetitions"] == 2
    assert (
        0
        < rows["served_tokens_per_cpu_s"]["median"]
        < 10 * rows["offline_tokens_per_cpu_s"]["median"]
    )
