"""Options stand for the work that rows name."""

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.engine.options import chosen_workload, make_parser, parse_options


def test_no_more_requests_than_the_workload_has() -> None:
    parser = make_parser("x", "")
    flags = ["--workload", "skewed", "--model", "tiny", "--num-requests"]
    assert len(chosen_workload(parser.parse_args([*flags, "64"])).requests) == 64
    with pytest.raises(BenchmarkError, match="at most 64, the requests of skewed; got 65"):
        chosen_workload(parser.parse_args([*flags, "65"]))


@pytest.mark.parametrize(
    "flags",
    [
        ["--set", "nonsense=1"],
        ["--set", "model=other"],
        ["--set", "block_size=16", "--block-size", "32"],
        ["--block-size", "7"],
        ["--threads", "100000"],
        ["--seed", "-1"],
    ],
)
def test_options_that_cannot_work_are_refused_before_an_engine_starts(flags, capsys) -> None:
    parser = make_parser("x", "")
    assert parse_options(parser, ["--set", "block_size=32"]).settings == [("block_size", 32)]
    with pytest.raises(SystemExit, match="2"):
        parse_options(parser, flags)
    assert "error: " in capsys.readouterr().err
