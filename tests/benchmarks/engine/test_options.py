"""Options stand for the work that rows name."""

import pytest

from benchmarks.engine.options import chosen_workload, make_parser


def test_no_more_requests_than_the_workload_has() -> None:
    parser = make_parser("x", "")
    flags = ["--workload", "skewed", "--model", "tiny", "--num-requests"]
    assert len(chosen_workload(parser.parse_args([*flags, "64"])).requests) == 64
    with pytest.raises(SystemExit, match="at most 64, the requests of skewed; got 65"):
        chosen_workload(parser.parse_args([*flags, "65"]))
