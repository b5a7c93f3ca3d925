"""256 streams for two minutes, then 5,000 requests in bursts: nothing lost, mixed, held or grown.

About four minutes: pytest -m slow tests/end_to_end/test_load.py
Shorter and longer ones, and its figures: python -m benchmarks.serve.soak --help
"""

from pathlib import Path

import pytest

from benchmarks.serve import soak

pytestmark = pytest.mark.slow


def test_every_answer_is_the_offline_one_and_memory_is_flat(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    size = ("--num-streams", "256", "--duration-s", "120", "--num-burst-requests", "5000")
    flags = ("--disable-uvicorn-access-log",)
    # So that rounding decides nothing, and every character can be compared.
    arguments = [*size, "--batch-invariant", "--out", str(tmp_path / "rows.jsonl"), "--", *flags]
    exit_code = soak.main(arguments)
    said = capsys.readouterr().out
    assert "streams_itl_ms_p99" in said
    assert exit_code == 0, said
