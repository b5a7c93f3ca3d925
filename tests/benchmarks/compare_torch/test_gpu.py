"""Units name what is compared; the report has ratios and shares of the roofline."""

import inspect

import pytest

from benchmarks.compare_torch import gpu
from benchmarks.compare_torch.__main__ import main
from benchmarks.compare_torch.gpu import GROUPS, PAXKV, PAXKV_XLA, TRANSFORMERS, report, units_of
from benchmarks.compare_torch.gpu_paxkv import PaxkvModel


def row(engine: str, case: str, metric: str, median: float, **fields) -> dict:
    return {"unit": f"time|llama|{case}|{engine}", "metric": metric, "median": median, **fields}


def test_report_compares_engines_and_takes_shares_of_the_copy_bandwidth() -> None:
    copy = {"unit": "machine|device|copy|jax", "metric": "copy_gb_per_s", "median": 4000.0}
    # 16 GB at 4,000 GB/s take 4 ms, of 5 ms.
    rows = [
        copy,
        row(PAXKV, "decode", "step_ms", 5.0, read_bytes_per_step=16e9),
        row(PAXKV, "throughput", "tokens_per_s", 900.0),
        row(TRANSFORMERS, "throughput", "tokens_per_s", 400.0),
    ]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report(rows, device="H200").splitlines()
    ]
    assert ["throughput: tokens_per_s", "900.00", "", "400.00", "2.25"] in lines
    assert ["decode: roofline_percent", "80.00", "", "", ""] in lines
    assert "not measured" in report(rows[1:], device="H200")


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_units_are_named_once_and_can_be_measured(is_rehearsal: bool, monkeypatch) -> None:
    units = gpu.all_units(is_rehearsal=is_rehearsal)
    assert len({unit.key for unit in units}) == len(units)
    asked = []
    monkeypatch.setattr(gpu, "_measure", lambda *arguments, **_: asked.append(arguments))
    for model, engine, _ in GROUPS:
        group = units_of(model, engine, is_rehearsal=is_rehearsal)
        assert group[0].case == "load"
        for unit in group:
            unit.measure(7)
    assert {engine for _, engine, *_ in asked} == {PAXKV, PAXKV_XLA, TRANSFORMERS}
    for _, _, method, arguments, seed in asked:
        inspect.signature(getattr(PaxkvModel, method)).bind(None, *arguments, seed)


def test_platform_chooses_the_comparison(capsys) -> None:
    assert main(["--platform", "gpu", "--list", "--only", "qwen3-0.6b"]) == 0
    assert "time|qwen3-0.6b|throughput|transformers" in capsys.readouterr().out
    for platform, word in (("gpu", "roofline"), ("cpu", "contiguous-N")):
        with pytest.raises(SystemExit, match="0"):
            main(["--platform", platform, "--help"])
        assert word in capsys.readouterr().out
