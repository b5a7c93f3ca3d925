"""Tests of `benchmarks/markdown_table.py`."""

from benchmarks.tables import markdown_table, short_cases, spread


def test_tables_are_aligned() -> None:
    table = markdown_table(["name", "x"], [["a", "10"], ["long name", "9"]])
    assert table.splitlines() == [
        "| name      |  x |",
        "| --------- | -: |",
        "| a         | 10 |",
        "| long name |  9 |",
    ]


def test_cases_are_shortened_to_what_differs() -> None:
    common, left = short_cases(["pool runs=[1, 2] size=3", "pool runs=[1, 2] size=4"])
    assert (common, left) == ("pool runs=[1, 2]", ["size=3", "size=4"])
    assert short_cases(["size=3"]) == ("size=3", [""])


def test_figures_are_written_with_their_range() -> None:
    assert spread([1.0, 3.0, 2.0]) == "2.00 (1.00 to 3.00)"
    assert spread([1234.5], 1) == "1,234.5"
