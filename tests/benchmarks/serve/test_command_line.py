"""Flags are checked where they are read."""

import math

import pytest

from benchmarks.serve.command_line import make_parser


def test_defaults_send_all_at_once() -> None:
    arguments = make_parser("").parse_args([])
    assert (arguments.request_rate, arguments.max_concurrency) == (math.inf, None)


def test_bounds_have_a_name_and_milliseconds() -> None:
    arguments = make_parser("").parse_args(["--goodput", "ttft:200", "e2el:1500.5"])
    assert arguments.goodput == [("ttft", 200.0), ("e2e", 1500.5)]


@pytest.mark.parametrize(
    "flags",
    [
        ["--goodput", "speed:3"],
        ["--goodput", "ttft"],
        ["--goodput", "ttft:0"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--max-concurrency", "0"],
        ["--num-warmups", "-1"],
        ["--extra-body", "[1]"],
        ["--extra-body", "{"],
    ],
)
def test_values_that_mean_nothing_are_refused(flags: list[str], capsys) -> None:
    with pytest.raises(SystemExit):
        make_parser("").parse_args(flags)
    assert flags[0] in capsys.readouterr().err


def test_percent_signs_do_not_break_the_help() -> None:
    assert "--max-concurrency" in make_parser("100 %").format_help()
