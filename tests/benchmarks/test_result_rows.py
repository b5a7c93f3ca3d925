"""A result row says everything that is needed to take the figure again."""

import importlib.metadata
import json
import platform

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


@pytest.mark.parametrize("peers", [{}, {"torch": "2.9", "transformers": "5.0"}])
def test_versions_of_peers_are_told_where_they_are_installed(monkeypatch, peers) -> None:
    installed = {"jax": "0.10", "numpy": "2.4"} | peers

    def version(package: str) -> str:
        if package not in installed:
            raise importlib.metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(importlib.metadata, "version", version)
    result_rows._versions.cache_clear()
    versions = make_row().as_dict()["versions"]
    result_rows._versions.cache_clear()
    ours = {"python": platform.python_version(), "paxkv": "not installed"}
    assert versions == ours | installed


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
