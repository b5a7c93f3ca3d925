"""The first difference has the path of the value."""

import pytest

from paxkv.trace.calls import CachedRow, Decision, NewRow
from paxkv.trace.difference import Difference, first_difference


def decision(*, blocks: list[list[int]], order: list[str] | None = None) -> Decision:
    return Decision(
        running=[CachedRow("a", 1, 5, 2, None), CachedRow("b", 1, 7, 0, blocks)],
        order=order or [],
        spec_decode_tokens={"a": [1]},
    )


def test_equal_values_have_no_difference() -> None:
    assert first_difference(decision(blocks=[[1], [2]]), decision(blocks=[[1], [2]])) is None


def test_path_of_a_nested_value_names_its_request() -> None:
    got, recorded = decision(blocks=[[1], [2, 3]]), decision(blocks=[[1], [2, 4]])
    assert first_difference(got, recorded, ".decision") == Difference(
        "decision.running['b'].new_block_ids[1][1]", 3, 4
    )


def test_first_of_several_differences_is_returned() -> None:
    got, recorded = decision(blocks=[[1]], order=["x"]), decision(blocks=[[2]], order=["y"])
    assert first_difference(got, recorded).path == "running['b'].new_block_ids[0][0]"


@pytest.mark.parametrize(
    ("got", "recorded", "wanted"),
    [
        ([1, 2], [1], Difference("[1]", 2, None)),
        ([1], [1, 2], Difference("[1]", None, 2)),
        ([[1]], [None], Difference("[0]", [1], None)),
        ({"a": 1}, {"b": 1}, Difference("", {"a": 1}, {"b": 1})),
        ({"a": [1]}, {"a": [2]}, Difference("['a'][0]", 1, 2)),
        (1, "1", Difference("", 1, "1")),
        ((1, 2), (1, 3), Difference("[1]", 2, 3)),
    ],
)
def test_lists_dicts_and_values_are_compared(
    got: object, recorded: object, wanted: Difference
) -> None:
    assert first_difference(got, recorded) == wanted


def test_path_has_an_index_if_the_request_ids_differ() -> None:
    got, recorded = [NewRow("a", 1, 0, [[1]])], [NewRow("b", 1, 0, [[1]])]
    assert first_difference(got, recorded) == Difference("[0].req_id", "a", "b")
