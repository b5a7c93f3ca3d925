"""The command line: it lists, and refuses what it does not know."""

from pathlib import Path

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.ops.__main__ import main


def test_list_prints_the_units_and_runs_none(capsys) -> None:
    assert main(["--platform", "gpu", "--list", "--only", "kv_scatter"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "time|kv_scatter|8,192 tokens|mosaic_gpu" in lines
    assert "check|kv_scatter|middle row|xla" in lines


def test_compile_only_wants_a_description(tmp_path: Path) -> None:
    missing = str(tmp_path / "gpu.textproto")
    with pytest.raises(BenchmarkError, match="--target-config"):
        main(["--platform", "gpu", "--compile-only", "--target-config", missing])
