"""The command watches an engine's thread and its device, and writes rows."""

import json

import pytest

from benchmarks.host import engine_step


@pytest.mark.slow
def test_command_writes_what_host_and_device_did(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(engine_step, "RESULTS_FOLDER", tmp_path)
    options = ["--model", "tiny", "--num-requests", "2", "--num-steps", "8", "--repetitions", "2"]
    settings = ["max_num_batched_tokens=16", "max_decode_burst=2", "enable_compilation_cache=false"]
    assert engine_step.main([*options, *(f"--set={name}" for name in settings), "--save"]) == 0
    lines = (tmp_path / "engine_step.jsonl").read_text().splitlines()
    rows = {row["metric"]: row for row in map(json.loads, lines)}
    assert all(row["num_repetitions"] == 2 for row in rows.values())
    assert 0 < rows["host_ms_a_step"]["median"] < rows["step_ms"]["median"]
    assert 0 < rows["host_percent"]["median"] < 100
    assert 0 <= rows["device_idle_percent"]["median"] < 100
    assert "| host_ms_a_step" in capsys.readouterr().out
