"""Bars are what the engine's trace says, and slots are never shared."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import continuous_vs_static
from benchmarks.continuous_vs_static import (
    MODES,
    BatchingRun,
    Mode,
    RequestBar,
    make_run,
    read_trace,
    table,
)
from benchmarks.random_checkpoint import MODEL_SHAPES, write_checkpoint
from benchmarks.workloads import Workload, WorkloadRequest
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.trace.calls import (
    AddRequestCall,
    Decision,
    NewRow,
    OutputRow,
    ScheduleCall,
    UpdateCall,
    encode_request,
)
from paxkv.trace.trace_file import StepLine
from tests.paxkv.fake_build import fake_model_parts


def bar(index: int, start_s: float, first_token_s: float, end_s: float) -> RequestBar:
    return RequestBar(
        index=index, start_s=start_s, first_token_s=first_token_s, end_s=end_s, num_tokens=10
    )


def test_requests_take_the_lowest_free_slot() -> None:
    bars = [bar(2, 2.0, 2.5, 6.0), bar(0, 0.0, 1.0, 5.0), bar(1, 0.0, 1.0, 2.0)]
    run = make_run("continuous", 2, bars)
    assert {b.index: b.slot for b in run.bars} == {0: 0, 1: 1, 2: 1}
    # Held for 5 + 2 + 4 of 2 x 6 seconds.
    assert run.wall_s == 6.0
    assert run.occupancy_percent == pytest.approx(100 * 11 / 12)
    figures = run.figures()
    assert figures["output_tokens_per_s"] == pytest.approx(5)
    assert figures["mean_first_token_s"] == pytest.approx(1.5)
    assert figures["mean_answer_s"] == pytest.approx(13 / 3)


def test_bars_are_read_from_a_trace() -> None:
    def arrival(req_id: str, at_s: float) -> AddRequestCall:
        request = EngineRequest(
            request_id=req_id, prompt_token_ids=[1, 2], sampling_params=SamplingParams()
        )
        return AddRequestCall(request=encode_request(request), at_s=at_s)

    def step(at_s: float, *req_ids: str) -> ScheduleCall:
        rows = [NewRow(req_id, 2, 0, [[1]]) for req_id in req_ids]
        return ScheduleCall(step=1, decision=Decision(new=rows), at_s=at_s)

    def tokens(at_s: float, *outputs: tuple[str, list[int], str | None]) -> UpdateCall:
        rows = [OutputRow(req_id, ids, reason, None, 0) for req_id, ids, reason in outputs]
        return UpdateCall(step=1, outputs=rows, at_s=at_s, took_s=0.5)

    calls = [
        arrival("first/0", 10.0),
        arrival("first/1", 10.25),
        step(11.0, "first/0"),
        tokens(12.0, ("first/0", [7], None)),
        step(13.0, "first/1"),
        tokens(14.0, ("first/0", [7, 8], "length"), ("first/1", [9], "length")),
        arrival("second/0", 20.0),
        step(20.5, "second/0"),
        tokens(21.0, ("second/0", [5], "length")),
    ]
    reader = SimpleNamespace(lines=lambda: [StepLine(calls=calls)])
    assert read_trace(reader) == {
        "first": [
            RequestBar(index=0, start_s=1.0, first_token_s=2.5, end_s=4.5, num_tokens=3),
            RequestBar(index=1, start_s=3.0, first_token_s=4.5, end_s=4.5, num_tokens=1),
        ],
        "second": [RequestBar(index=0, start_s=0.5, first_token_s=1.5, end_s=1.5, num_tokens=1)],
    }


def test_more_requests_than_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="request 1"):
        make_run("static", 1, [bar(0, 0.0, 1.0, 2.0), bar(1, 1.0, 1.5, 3.0)])


def test_ratios_are_of_repetitions() -> None:
    def run(mode: str, end_s: float) -> BatchingRun:
        return make_run(mode, 1, [bar(0, 0.0, 0.5, end_s)])

    repetitions = [
        {"static": run("static", s), "continuous": run("continuous", c)}
        for s, c in ((4.0, 2.0), (9.0, 3.0), (5.0, 4.0))
    ]
    lines = [[cell.strip() for cell in x.split("|")[1:-1]] for x in table(repetitions).splitlines()]
    assert ["wall_s", "5", "3", "2.00 (1.25 to 3.00)"] in lines


@pytest.fixture
def short_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long request among short ones, in two slots."""
    requests = [
        WorkloadRequest(prompt_token_ids=[20 + i] * 6, num_output_tokens=num_out)
        for i, num_out in enumerate((40, 3, 4, 5, 6, 7))
    ]
    workload = Workload(name="short", requests=requests)
    monkeypatch.setattr(continuous_vs_static, "make_workload", lambda name, **_: workload)


def check_both_modes(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the command on a model, and looks at its runs and its rows."""
    kept: list[dict[Mode, BatchingRun]] = []
    monkeypatch.setattr(
        continuous_vs_static, "table", lambda repetitions: kept.extend(repetitions) or "a table"
    )
    flags = ["--model", str(model), "--num-requests", "6", "--num-slots", "2"]
    flags += ["--max-batched-tokens", "16", "--num-repetitions", "1"]
    assert continuous_vs_static.main([*flags, "--out", str(folder / "rows.jsonl")]) == 0
    (runs,) = kept
    for run in runs.values():
        assert sorted(b.index for b in run.bars) == list(range(6))
        assert all(0 <= b.start_s < b.first_token_s <= b.end_s for b in run.bars)
        assert 0 < run.occupancy_percent <= 100
        assert run.num_output_tokens == 40 + 3 + 4 + 5 + 6 + 7
    # A static batch begins when all of the one before have ended.
    static = {b.index: b for b in runs["static"].bars}
    assert static[2].start_s >= static[0].end_s > static[1].end_s
    assert static[4].start_s >= max(static[2].end_s, static[3].end_s)
    # Continuous batching puts the next request in as soon as one has ended.
    continuous = {b.index: b for b in runs["continuous"].bars}
    assert continuous[1].end_s <= continuous[2].start_s < continuous[0].end_s
    assert [continuous[i].slot for i in range(6)] == [0, 1, 1, 1, 1, 1]
    lines = (folder / "rows.jsonl").read_text().splitlines()
    medians = {row["metric"]: row["median"] for row in map(json.loads, lines)}
    ratio = runs["static"].wall_s / runs["continuous"].wall_s
    assert medians["wall_time_static_over_continuous"] == pytest.approx(ratio)
    assert "slot_occupancy_percent" in medians


def test_more_requests_than_the_workload_has_are_refused(tmp_path: Path, capsys) -> None:
    flags = ["--num-requests", "65", "--model", str(tmp_path)]
    with pytest.raises(SystemExit):
        continuous_vs_static.main([*flags, "--out", str(tmp_path / "rows.jsonl")])
    assert "--num-requests must be at most 64, got 65" in capsys.readouterr().err


def test_both_modes_run_all_requests(tmp_path: Path, monkeypatch, short_workload) -> None:
    fake_model_parts(monkeypatch)
    check_both_modes(tmp_path, tmp_path, monkeypatch)


@pytest.mark.slow
def test_both_modes_run_all_requests_on_a_device(
    tmp_path: Path, monkeypatch, short_workload
) -> None:
    model = write_checkpoint(tmp_path / "tiny", MODEL_SHAPES["tiny"])
    check_both_modes(model, tmp_path, monkeypatch)


def test_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.continuous_vs_static_plot import draw_runs

    bars = [(0, 0.0, 0.2, 2.0), (1, 0.1, 0.6, 1.0), (2, 2.0, 2.1, 2.5)]
    runs = [make_run(mode, 2, [bar(*times) for times in bars]) for mode in MODES]
    draw_runs(runs, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
