"""Wrong values of flags are refused before the measurement, in one line."""

import argparse
import functools

import pytest

from benchmarks import command_line
from benchmarks.command_line import BenchmarkError
from benchmarks.engine.options import chosen_workload, make_parser, parse_options
from benchmarks.ops import __main__ as ops
from benchmarks.serve import command_line as serve


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


read_engine_flags = functools.partial(parse_options, make_parser("x", ""))


@pytest.mark.parametrize(
    ("read", "flags"),
    [
        (serve.make_parser("").parse_args, "--goodput speed:3"),
        (serve.make_parser("").parse_args, "--extra-body {"),
        (serve.make_parser("").parse_args, "--base-url localhost"),
        (read_engine_flags, "--set nonsense=1"),
        (read_engine_flags, "--set model=other"),
        (read_engine_flags, "--set block_size=16 --block-size 32"),
        (read_engine_flags, "--block-size 7"),
        (read_engine_flags, "--threads 100000"),
        (ops.main, "--platform cpu --again"),
        (ops.main, "--platform gpu --quick"),
    ],
)
def test_flags_that_cannot_work_are_refused(read, flags: str, capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        read(flags.split())
    assert "error: " in capsys.readouterr().err


def test_flag_of_the_other_platform_is_refused_with_what_to_do(capsys) -> None:
    with pytest.raises(SystemExit):
        ops.main(["--platform", "cpu", "--time-limit", "99"])
    assert "--time-limit needs --platform gpu; omit it, or" in capsys.readouterr().err


def test_workload_has_no_more_requests_than_it_has() -> None:
    with pytest.raises(BenchmarkError, match="at most 64, the requests of mixed; got 65"):
        chosen_workload(read_engine_flags(["--num-requests", "65"]))
