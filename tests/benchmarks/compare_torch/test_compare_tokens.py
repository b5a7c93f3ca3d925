"""Differences are found where they begin, and ties are told from errors."""

from benchmarks.compare_torch.compare_tokens import differences
from benchmarks.workloads import Workload, WorkloadRequest

WORKLOAD = Workload(
    name="two",
    requests=[
        WorkloadRequest(prompt_token_ids=[7, 8], num_output_tokens=3),
        WorkloadRequest(prompt_token_ids=[9], num_output_tokens=2),
    ],
)


def test_equal_tokens_have_no_difference() -> None:
    assert differences(WORKLOAD, [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]], None) == []


def test_first_difference_of_a_request_is_judged_after_what_was_before_it() -> None:
    asked = []

    def logit_gap(*question: object) -> float:
        asked.append(question)
        return 0.25

    (found,) = differences(WORKLOAD, [[1, 2, 3], [4, 5]], [[1, 6, 0], [4, 5]], logit_gap)
    assert asked == [([7, 8, 1], 2, 6)]
    assert (found.request_idx, found.position, found.wanted, found.got) == (0, 1, 2, 6)
    assert "request 0, new token 1: got 6, wanted 2" in str(found)
    assert found.is_tie(0.25)
    assert not found.is_tie(0.2)


def test_what_nobody_can_judge_is_no_tie() -> None:
    (found,) = differences(WORKLOAD, [[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 0]], None)
    assert (found.request_idx, found.position, found.logit_gap) == (1, 1, None)
    assert not found.is_tie(1e9)
