"""A result row says everything that is needed to take the figure again."""

import json

from benchmarks.result_rows import ResultRow, append_rows


def test_rows_are_appended_as_json_lines(tmp_path) -> None:
    row = ResultRow(
        benchmark="benchmarks.host.kv_waste",
        case="block_size=16",
        metric="waste_percent",
        values=[3.0, 1.0, 2.0],
        device="a processor",
    )
    file = tmp_path / "deep" / "rows.jsonl"
    append_rows([row], file)
    append_rows([row], file)
    first, second = (json.loads(line) for line in file.read_text().splitlines())
    assert first == second
    assert (first["median"], first["min"], first["max"]) == (2.0, 1.0, 3.0)
    for key in ("device", "versions", "commit", "command", "date"):
        assert first[key]
