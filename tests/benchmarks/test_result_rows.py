"""A result row holds everything that is needed to measure the figure again."""

import json

import pytest

from benchmarks import result_rows
from benchmarks.result_rows import ResultRow, append_rows


def test_rows_are_appended_as_json_lines(tmp_path) -> None:
    row = ResultRow(
        benchmark="b",
        case="block_size=16",
        metric="waste_percent",
        values=[3.0, 1.0, 2.0],
        device="a processor",
        details={"commit": "abc", "num_bytes": 7},
    )
    file = tmp_path / "deep" / "rows.jsonl"
    append_rows([row], file)
    append_rows([row], file)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    assert (first["num_repetitions"], first["commit"], first["num_bytes"]) == (3, "abc", 7)
    assert first["versions"]["jax"] and first["command"].startswith("python -m b")


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (
            ["model name : EPYC", "cpu family : 26", "model : 2", "flags : avx2 avx512f"],
            "EPYC (family 26 model 2, AVX-512)",
        ),
        (["CPU implementer : 0x41", "bogomips"], None),
    ],
)
def test_processors_of_one_name_have_different_descriptions(lines, name) -> None:
    second = ["", "model name : the second one"]
    assert result_rows._name_in_cpuinfo("\n".join([*lines, *second])) == name
