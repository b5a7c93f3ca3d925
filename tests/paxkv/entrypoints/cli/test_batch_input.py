"""The lines of an input are counted, and read one by one."""

import tracemalloc

import pytest

from paxkv.entrypoints.cli.batch_input import BatchInput


def test_lines_have_their_numbers_and_empty_lines_are_omitted(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"\na\r\n \t\nb b\n\n\xff")
    with BatchInput(str(path)) as lines:
        assert lines.num_lines == 3
        # The lines can be read more than once.
        for _ in range(2):
            assert list(lines) == [(2, b"a\r"), (4, b"b b"), (6, b"\xff")]


def test_byte_order_mark_is_not_part_of_the_first_line(tmp_path):
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbfa\n\xef\xbb\xbfb")
    with BatchInput(str(path)) as lines:
        assert list(lines) == [(1, b"a"), (2, b"\xef\xbb\xbfb")]


def test_only_few_lines_are_in_memory(tmp_path):
    path = tmp_path / "in"
    path.write_bytes((b"x" * 9_999 + b"\n") * 1000)
    tracemalloc.start()
    try:
        with BatchInput(str(path)) as lines:
            assert sum(len(line) for _, line in lines) == 9_999_000
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 500_000


def test_folder_as_input_is_an_error(tmp_path):
    with pytest.raises(IsADirectoryError):
        BatchInput(str(tmp_path))
