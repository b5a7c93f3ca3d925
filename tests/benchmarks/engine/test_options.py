"""Options and settings are checked before an engine starts."""

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.engine.options import chosen_workload, make_parser, parse_options


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
    right = parse_options(parser, ["--set", "block_size=32", "--num-requests", "65"])
    assert right.settings == [("block_size", 32)]
    with pytest.raises(BenchmarkError, match="at most 64, the requests of mixed; got 65"):
        chosen_workload(right)
    with pytest.raises(SystemExit, match="2"):
        parse_options(parser, flags)
    assert "error: " in capsys.readouterr().err
