"""Tests of `benchmarks/markdown_table.py`."""

from benchmarks.tables import markdown_table


def test_tables_are_aligned() -> None:
    table = markdown_table(["name", "x"], [["a", "10"], ["long name", "9"]])
    assert table.splitlines() == [
        "| name      |  x |",
        "| --------- | -: |",
        "| a         | 10 |",
        "| long name |  9 |",
    ]
