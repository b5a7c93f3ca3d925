"""A request's grammar is compiled beside the steps, moves on with its tokens, and goes with it."""

import time

import numpy as np
import pytest

from paxkv.errors import InvariantError
from paxkv.structured_output.grammar_manager import GrammarManager
from paxkv.structured_outputs_params import StructuredOutputsParams
from tests.paxkv.structured_output.demo_grammars import (
    EOS,
    TOKENIZER,
    allowed_ids,
    make_compiler,
)


@pytest.fixture
def manager():
    manager = GrammarManager(make_compiler())
    yield manager
    manager.close()


def _add(manager, request_id, **fields):
    manager.add(request_id, StructuredOutputsParams(**fields))
    deadline_s = time.monotonic() + 20
    while not manager.is_ready(request_id) and not manager.take_failed():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def test_masks_follow_the_tokens_of_each_request(manager):
    _add(manager, "a", choice=["no", "yes"])
    _add(manager, "b", regex="[0-9]+")
    bitmask = manager.make_bitmask(["b", "a"])
    assert bitmask.req_ids == ["b", "a"]
    assert bitmask.bitmask_np.dtype == np.int32
    assert {TOKENIZER.decode([i])[0] for i in allowed_ids(bitmask, 1)} == {"n", "y"}
    assert all(TOKENIZER.decode([i]).isdecimal() for i in allowed_ids(bitmask, 0))
    manager.advance("a", TOKENIZER.encode("yes"))
    manager.advance("b", TOKENIZER.encode("7"))
    bitmask = manager.make_bitmask(["a", "b"])
    # The first is complete, the second may be.
    assert allowed_ids(bitmask, 0) == [EOS]
    assert EOS in allowed_ids(bitmask, 1) and len(allowed_ids(bitmask, 1)) > 9
    assert manager.take_failed() == {}


def test_one_mask_is_that_of_several_together(manager):
    for request_id in "ab":
        _add(manager, request_id, regex="[a-c]{3}")
    alone = manager.make_bitmask(["a"]).bitmask_np
    together = manager.make_bitmask(["a", "b"]).bitmask_np
    assert (together == alone).all()


def test_a_token_without_a_place_ends_the_request_with_the_reason(manager):
    _add(manager, "a", choice=["no", "yes"])
    manager.advance("a", TOKENIZER.encode("8"))
    failed = manager.take_failed()
    assert list(failed) == ["a"] and failed["a"].startswith("the grammar cannot go on")
    assert manager.take_failed() == {} and manager.num_requests == 0


def test_a_grammar_that_cannot_be_compiled_after_all_is_told_of(manager):
    manager.add("a", StructuredOutputsParams(regex="(a"))
    failed = {}
    deadline_s = time.monotonic() + 20
    while not failed:
        assert time.monotonic() < deadline_s
        assert not manager.is_ready("a")
        failed = manager.take_failed()
    assert "unclosed group" in failed["a"]


def test_requests_that_go_are_forgotten_wherever_they_stand(manager):
    _add(manager, "a", regex="a")
    manager.add("b", StructuredOutputsParams(regex="b"))
    for request_id in "abc":
        manager.remove(request_id)
    assert manager.num_requests == 0
    assert not manager.is_ready("a")
    with pytest.raises(InvariantError, match="without its grammar"):
        manager.make_bitmask(["a"])
