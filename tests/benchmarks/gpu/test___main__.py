"""Both engines give figures for every case; models have the published sizes."""

import json

import pytest

from benchmarks.gpu.__main__ import main, report
from benchmarks.gpu.subject import MODEL_CONFIGS, EngineStep, steady_decode
from benchmarks.gpu.units import PAXKV, all_units
from benchmarks.units.run import unit_rows
from benchmarks.units.runner import run_unit
from benchmarks.units.unit import Measured, Result

UNITS = [unit for unit in all_units(is_rehearsal=True) if unit.op == "llama-3.1-8b"]


@pytest.mark.slow
def test_paxkv_measures_every_case_and_is_compared() -> None:
    """In this process, with invented figures of transformers."""
    theirs = {"outcome": "done", "measured": Measured(figures={"tokens_per_s": [2.0]})}
    results = [
        Result(unit=unit, **(run_unit(unit, 1) if unit.body == PAXKV else theirs)) for unit in UNITS
    ]
    rows = [row.as_dict() for result in results for row in unit_rows(result, "b", "d", {})]
    ours = {row["metric"]: row for row in rows if row["unit"].endswith("|paxkv")}
    assert ours.keys() == {"tokens_per_s", "step_ms", "ttft_ms"}
    assert all(row["median"] > 0 for row in ours.values())
    lines = [line.split("|")[1:-1] for line in report(rows, "d").splitlines()]
    (cells,) = (line[1:] for line in lines if line and "throughput: tokens_per_s" in line[0])
    ours, theirs, ratio = (float(cell.replace(",", "")) for cell in cells)
    assert theirs == 2.0 and ratio == pytest.approx(ours / 2, rel=0.02)


@pytest.mark.slow
def test_rehearsal_measures_every_case_with_both_engines(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--rehearse", "--only", "llama-3.1-8b", "--out", str(out)]
    assert main(command) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    rows = [row for row in rows if not row["unit"].startswith("machine")]
    assert {row["unit"] for row in rows} == {unit.key for unit in UNITS}
    # A machine without torch measures paxkv alone.
    found = {(row["outcome"], row["rehearsal"]) for row in rows}
    assert found in ({("done", True)}, {("done", True), ("absent", True)})


def test_steady_decode_excludes_prompts_and_ends() -> None:
    names = ("end_s", "num_tokens", "num_started", "num_finished")
    totals = [(0.5, 1, 1, 0), (1.0, 3, 2, 0), (2.0, 11, 2, 0), (4.0, 51, 2, 0), (9.0, 52, 2, 1)]
    steps = [EngineStep(**dict(zip(names, of_step, strict=True))) for of_step in totals]
    # 48 tokens of 2 requests in 3 s, from the first step with both to the last before an end.
    assert steady_decode(steps, 2) == {"step_ms": [125.0], "tokens_per_s": [16.0]}
    with pytest.raises(ValueError, match="got 1 steps of steady decode"):
        steady_decode(steps[:2], 2)


@pytest.mark.parametrize(
    ("model", "published"), [("qwen3-0.6b", 596_049_920), ("llama-3.1-8b", 8_030_261_248)]
)
def test_shapes_have_as_many_weights_as_the_published_models(model, published) -> None:
    config = MODEL_CONFIGS[model]
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    num_heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = num_heads * head_dim * hidden + 3 * hidden * config["intermediate_size"] + 2 * hidden
    if model.startswith("qwen3"):
        layer += 2 * head_dim
    tables = (2 - config["tie_word_embeddings"]) * config["vocab_size"] * hidden
    assert config["num_hidden_layers"] * layer + tables + hidden == published
