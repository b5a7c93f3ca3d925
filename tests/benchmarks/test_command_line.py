"""Wrong values of flags are refused before the measurement, in one line."""

import argparse

import pytest

from benchmarks import command_line


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (command_line.positive_int, "3", ["0", "-1", "1.5", "x", ""]),
        (command_line.natural, "0", ["-1"]),
        (command_line.whole_number(2, 4), "4", ["1", "5"]),
        (command_line.seed_number, str(2**32 - 1), ["-1", str(2**32)]),
        (command_line.positive_float, "0.5", ["0", "nan", "inf", "x"]),
        (command_line.natural_float, "0", ["-0.1", "nan", "inf"]),
    ],
)
def test_number_out_of_its_range_is_refused(read, good, bad) -> None:
    assert read(good) == float(good)
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="must be"):
            read(text)


def test_output_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").touch()
    for read, place in (
        (command_line.output_file, tmp_path),
        (command_line.output_file, tmp_path / "file" / "x"),
        (command_line.output_folder, tmp_path / "file"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=f"{place} cannot be written"):
            read(str(place))
