"""A grammar is compiled while steps run, advances with its request's tokens, and ends with it."""

import json
import random
import threading
import time

import numpy as np
import pytest

from paxkv.config.sampling_params import SamplingParams
from paxkv.config.structured_outputs_params import FormField, StructuredOutputsParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.errors import InvariantError
from paxkv.structured_output.bound_request import GrammarEnd
from paxkv.structured_output.grammar_compiler import GrammarCompiler
from paxkv.structured_output.grammar_manager import GrammarManager
from tests.paxkv.structured_output.demo_grammars import (
    CLOSE,
    EOS,
    OPEN,
    SETUP,
    TOKENIZER,
    VOCAB_SIZE,
    WITH_TEXT,
    allowed_ids,
    make_compiler,
)


@pytest.fixture
def manager():
    manager = GrammarManager(make_compiler())
    yield manager
    manager.close()


def _request(request_id, *, bad_words=(), sampling=None, is_heavy=False, **fields):
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[5],
        sampling_params=SamplingParams(
            structured_outputs=StructuredOutputsParams(**fields), **(sampling or {})
        ),
        eos_token_ids=(EOS,),
        bad_words_token_ids=bad_words,
        needs_grammar=True,
        has_heavy_grammar=is_heavy,
    )


def add_request(manager, request_id, **fields):
    manager.add(_request(request_id, **fields))
    deadline_s = time.monotonic() + 60
    while not manager.is_ready(request_id) and not manager.drain_ended():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def _ids(text):
    return TOKENIZER.encode(text, add_special_tokens=False)


def _allowed_text(manager, request_id):
    bitmask = manager.make_bitmask([request_id])
    return {TOKENIZER.decode([i], skip_special_tokens=False) for i in allowed_ids(bitmask)}


def test_masks_follow_the_tokens_of_each_request(manager):
    add_request(manager, "a", choice=["no", "yes"])
    add_request(manager, "b", regex="[0-9]+")
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
    assert manager.drain_ended() == {}


def test_one_mask_equals_that_of_a_batch(manager):
    for request_id in "ab":
        add_request(manager, request_id, regex="[a-c]{3}")
    alone = manager.make_bitmask(["a"]).bitmask_np
    together = manager.make_bitmask(["a", "b"]).bitmask_np
    assert (together == alone).all()


def test_a_token_without_a_place_ends_the_request_with_the_reason(manager):
    form = {"choice": ["no", "yes"], "sent_in": (FormField(name="response_format"),)}
    add_request(manager, "a", **form)
    manager.advance("a", _ids("y"))
    manager.advance("a", _ids("8"))
    ended = manager.drain_ended()
    assert list(ended) == ["a"]
    start = "the grammar of response_format cannot go on after 2 tokens: "
    assert ended["a"].error.startswith(start)
    assert manager.drain_ended() == {} and manager.num_requests == 0


def test_a_complete_text_of_the_grammar_ends_the_answer_without_an_eos_token(manager):
    add_request(manager, "a", regex="[0-9]+", sampling={"ignore_eos": True})
    manager.advance("a", _ids("7"))
    assert manager.drain_ended() == {}
    manager.advance("a", [EOS])
    assert manager.drain_ended() == {"a": GrammarEnd()}


def test_a_grammar_that_ends_within_the_drafts_ends_there(manager):
    """Whether or not `ignore_eos` lets the scheduler read tokens after the end."""
    add_request(manager, "a", regex="[0-9]+", sampling={"ignore_eos": True})
    seven, eight = _ids("7")[-1], _ids("8")[-1]
    bitmask = manager.make_bitmask(["a"], {"a": [seven, EOS, eight]})
    after_seven, after_eos, after_eight = (set(allowed_ids(bitmask, row)) for row in (1, 2, 3))
    assert {EOS, eight} <= after_seven < set(range(VOCAB_SIZE)) == after_eos == after_eight
    # Drafts that are not accepted change nothing.
    assert not manager.ends_within("a", 2) and manager.advance("a", [seven, eight]) == 2
    assert manager.drain_ended() == {}
    manager.make_bitmask(["a"], {"a": [EOS, eight]})
    assert manager.ends_within("a", 2) and manager.advance("a", [EOS, eight]) == 1
    assert manager.drain_ended() == {"a": GrammarEnd()}


def test_an_error_within_the_drafts_counts_the_tokens_before_it(manager):
    ab = _ids("a")[-1], _ids("b")[-1]
    add_request(manager, "a", regex="ab[0-9]", sampling={"allowed_token_ids": list(ab)})
    manager.advance("a", ab[:1])
    manager.make_bitmask(["a"], {"a": [ab[1]]})
    assert manager.advance("a", [ab[1], 5]) == 1
    assert "cannot go on after 2 tokens" in manager.drain_ended()["a"].error


def test_settings_of_the_request_narrow_what_its_grammar_allows(manager):
    allowed = [*_ids("7"), *_ids("8"), *_ids("x"), EOS]
    add_request(manager, "a", regex="[0-9]+", sampling={"allowed_token_ids": allowed})
    assert _allowed_text(manager, "a") == {"7", "8"}
    manager.advance("a", _ids("7"))
    assert _allowed_text(manager, "a") == {"7", "8", "<|im_end|>"}
    # No 7 at all, and no 5 behind 6.
    words = (tuple(_ids("7")), (*_ids("6"), *_ids("5")))
    add_request(manager, "b", regex="[5-7]*", bad_words=words, sampling={"min_tokens": 2})
    assert _allowed_text(manager, "b") == {"5", "6"}
    manager.advance("b", _ids("6"))
    assert _allowed_text(manager, "b") == {"6"}
    manager.advance("b", _ids("6"))
    assert _allowed_text(manager, "b") == {"6", "<|im_end|>"}
    assert manager.drain_ended() == {}


@pytest.mark.parametrize(
    ("fields", "written", "is_complete"),
    [
        ({"regex": "78", "sampling": {"min_tokens": 5}}, "78", True),
        ({"regex": "78", "sampling": {"allowed_token_ids": [25, 26]}}, "78", True),
        ({"regex": "78", "sampling": {"allowed_token_ids": [26]}}, "", False),
        ({"regex": "78", "bad_words": ((25, 26), (26, 25))}, "7", False),
        ({"regex": "[78]{3}", "bad_words": ((25, 26), (26, 25))}, "777", None),
    ],
)
def test_without_allowed_tokens_a_complete_grammar_ends_and_an_incomplete_one_fails(
    manager, fields, written, is_complete
):
    assert [_ids("7"), _ids("8")] == [[25], [26]]
    add_request(manager, "a", **fields)
    for token_id in _ids(written):
        assert token_id in allowed_ids(manager.make_bitmask(["a"]))
        manager.advance("a", [token_id])
    bitmask = manager.make_bitmask(["a"])
    if is_complete is None:
        assert manager.drain_ended() == {}
        return
    # The step in flight draws a token for its row, which is dropped.
    assert len(allowed_ids(bitmask)) > 700
    (end,) = manager.drain_ended().values()
    assert end == GrammarEnd() if is_complete else "allowed_token_ids, bad_words" in end.error
    assert manager.num_requests == 0


def test_a_grammar_that_fails_to_compile_later_is_reported(manager):
    manager.add(_request("a", regex="(a"))
    failed = {}
    deadline_s = time.monotonic() + 60
    while not failed:
        assert time.monotonic() < deadline_s
        assert not manager.is_ready("a")
        failed = manager.drain_ended()
    assert "unclosed group" in failed["a"].error


def test_ended_requests_are_removed_from_every_list(manager):
    add_request(manager, "a", regex="a")
    manager.add(_request("b", regex="b"))
    for request_id in "abc":
        manager.remove(request_id)
    assert manager.num_requests == 0
    assert not manager.is_ready("a")
    with pytest.raises(InvariantError, match="without its grammar"):
        manager.make_bitmask(["a"])


@pytest.mark.parametrize("seed", range(5))
def test_a_grammar_is_spelled_with_the_tokens_that_are_allowed(manager, seed):
    # Each character is a token; of "true" the usual ones are longer.
    characters = [i for i in range(VOCAB_SIZE) if len(TOKENIZER.token_text(i)) == 1]
    allowed = [*(i for i in characters if TOKENIZER.token_text(i) != "\ufffd"), EOS]
    schema = {"enum": [{"a": True}, {"b": "false and so"}, [None, "the cat"]]}
    add_request(manager, "a", json=schema, sampling={"allowed_token_ids": allowed})
    # Another way to forbid a usual token.
    (true,) = _ids(" cat")[:1]
    add_request(manager, "b", choice=["the cat"], bad_words=((true,),))
    draws = random.Random(seed)
    for request_id in "ab":
        text = []
        while not text or text[-1] != EOS:
            text.append(draws.choice(allowed_ids(manager.make_bitmask([request_id]))))
            if text[-1] != EOS:
                manager.advance(request_id, text[-1:])
            assert manager.drain_ended() == {}, TOKENIZER.decode(text)
        if request_id == "a":
            assert json.loads(TOKENIZER.decode(text)) in schema["enum"]
            assert set(text) <= set(allowed)
        else:
            assert TOKENIZER.decode(text) == "the cat" and true not in text


def test_the_grammar_starts_after_the_reasoning():
    manager = GrammarManager(make_compiler(thinks=True))
    for request_id, thoughts in (("a", "begun"), ("b", "maybe"), ("c", "maybe")):
        add_request(manager, request_id, choice=["no", "yes"], thoughts=thoughts)
    add_request(manager, "d", choice=["no", "yes"])
    form = set(allowed_ids(manager.make_bitmask(["d"])))
    assert set(allowed_ids(manager.make_bitmask(["b"]))) == form | {OPEN}
    assert set(allowed_ids(manager.make_bitmask(["a"]))) == WITH_TEXT - {EOS}
    manager.advance("a", _ids("yes? no!"))
    manager.advance("b", [OPEN])
    manager.advance("c", _ids("y"))
    together = manager.make_bitmask(["a", "b", "c", "d"])
    assert set(allowed_ids(together, 0)) == set(allowed_ids(together, 1))
    assert EOS not in allowed_ids(together, 0)
    assert OPEN not in allowed_ids(together, 2) and not form & set(allowed_ids(together, 2))
    assert set(allowed_ids(together, 3)) == form
    for request_id in "ab":
        manager.advance(request_id, [CLOSE])
        assert set(allowed_ids(manager.make_bitmask([request_id]))) == form
        manager.advance(request_id, _ids("yes"))
        assert allowed_ids(manager.make_bitmask([request_id])) == [EOS]
    assert manager.drain_ended() == {}
    manager.close()


def test_thoughts_without_their_tokens_are_refused(manager):
    manager.add(_request("a", regex="a", thoughts="maybe"))
    ended = {}
    deadline_s = time.monotonic() + 60
    while not ended:
        assert time.monotonic() < deadline_s
        manager.is_ready("a")
        ended = manager.drain_ended()
    assert "the tokens <think> and </think>" in ended["a"].error


def test_a_small_grammar_does_not_wait_for_a_heavy_one():
    may_go_on = threading.Event()

    class Compiler(GrammarCompiler):
        def compile(self, params):
            assert params.regex == "small" or may_go_on.wait(60)
            return super().compile(params)

    manager = GrammarManager(Compiler(**SETUP))
    for i in range(9):
        manager.add(_request(f"heavy{i}", regex=f"heavy{i}", is_heavy=True))
    add_request(manager, "small", regex="small")
    assert manager.num_compiling == 9
    may_go_on.set()
    # Where it is compiled already it is not heavy any more.
    add_request(manager, "again", regex="small", is_heavy=True)
    manager.close()
