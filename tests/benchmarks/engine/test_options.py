"""Options and settings are checked before an engine starts."""

import pytest

from benchmarks.command_line import BenchmarkError
from benchmarks.engine.options import chosen_workload, make_parser, parse_options
from benchmarks.engine.settings import engine_config, settings_by_part


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


def test_settings_go_to_the_part_with_their_field() -> None:
    parts = settings_by_part({"block_size": 32, "max_num_seqs": 2, "kernels": "xla"})
    assert (parts["cache"], parts["scheduler"]) == ({"block_size": 32}, {"max_num_seqs": 2})
    assert engine_config(parts).cache.block_size == 32
