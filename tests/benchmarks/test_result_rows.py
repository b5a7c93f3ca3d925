"""A result row says everything that is needed to take the figure again."""

import json

import pytest

from benchmarks import result_rows
from benchmarks.result_rows import ResultRow, append_rows


def make_row() -> ResultRow:
    return ResultRow(
        benchmark="benchmarks.host.kv_waste",
        case="block_size=16",
        metric="waste_percent",
        values=[3.0, 1.0, 2.0],
        device="a processor",
    )


def test_rows_are_appended_as_json_lines(tmp_path) -> None:
    row = make_row()
    file = tmp_path / "deep" / "rows.jsonl"
    append_rows([row], file)
    append_rows([row], file)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    for key in ("device", "versions", "commit", "command", "date"):
        assert first[key]


# /proc/cpuinfo of two machines that a cloud calls the same, an old one, one that says less than
# others, and two that are no x86.
@pytest.mark.parametrize(
    ("lines", "name"),
    [
        (
            ["model name\t: AMD EPYC", "cpu family\t: 25", "model\t\t: 1", "flags\t: fpu avx avx2"],
            "AMD EPYC (family 25 model 1, AVX2)",
        ),
        (
            ["model name : AMD EPYC", "cpu family : 26", "model : 2", "flags : avx2 avx512f"],
            "AMD EPYC (family 26 model 2, AVX-512)",
        ),
        (
            ["model name : Old", "cpu family : 6", "model : 1", "flags : fpu"],
            "Old (family 6 model 1)",
        ),
        (["model name : Some CPU", "cpu family : 6"], "Some CPU"),
        (["model name : ARMv8 Processor rev 1"], "ARMv8 Processor rev 1"),
        (["CPU implementer : 0x41", "bogomips"], None),
    ],
)
def test_processors_of_one_name_are_told_apart(lines, name) -> None:
    second = ["", "model name : the second one"]
    assert result_rows._name_in_cpuinfo("\n".join([*lines, *second])) == name
