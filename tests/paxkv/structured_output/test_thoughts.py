"""Thoughts have no grammar. Engine and text parsers find their end at the same token."""

import numpy as np
import pytest

from paxkv.structured_output.thoughts import Thoughts, find_thought_tokens
from paxkv.text.reasoning_parser import ReasoningParser
from tests.paxkv.structured_output.demo_grammars import (
    CLOSE,
    EOS,
    OPEN,
    THINKER,
    VOCAB_SIZE,
    WITH_TEXT,
    make_compiler,
)

NUM_WORDS = VOCAB_SIZE // 32


@pytest.fixture(scope="module")
def tokens():
    return make_compiler(thinks=True).thought_tokens()


def _allowed(thoughts, words=None):
    mask_np = np.zeros(NUM_WORDS, np.int32) if words is None else words
    thoughts.allow(mask_np)
    bits = np.unpackbits(mask_np.view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def _write(thoughts, text):
    for token_id in THINKER.encode(text, add_special_tokens=False):
        assert token_id in _allowed(thoughts)
        assert not thoughts.advance(token_id)


def test_reasoning_may_have_every_token_except_ends_of_the_answer(tokens):
    thoughts = Thoughts(tokens, is_begun=True)
    assert _allowed(thoughts) == WITH_TEXT - {EOS}
    _write(thoughts, "well, {</b> < /think")
    assert _allowed(thoughts) == WITH_TEXT - {EOS}
    assert thoughts.advance(CLOSE)


def test_reasoning_cannot_spell_the_rest_of_the_end_tag(tokens):
    (bracket,) = THINKER.encode(">", add_special_tokens=False)
    thoughts = Thoughts(tokens, is_begun=True)
    _write(thoughts, "so <</think")
    begins_so = {i for i in range(VOCAB_SIZE) if tokens.token_bytes[i].startswith(b">")}
    assert bracket in begins_so
    assert _allowed(thoughts) == WITH_TEXT - {EOS} - begins_so
    _write(thoughts, "<")
    assert bracket in _allowed(thoughts)


def test_a_token_that_has_the_tag_in_it_is_not_drawn():
    token_bytes = [b"<think>", b"</think>", b"x</think>y", b"<", b"</s>"]
    tokens = find_thought_tokens(token_bytes, open_id=0, close_id=1, eos_token_ids=[4], num_words=1)
    thoughts = Thoughts(tokens, is_begun=True)
    mask_np = np.zeros(1, np.int32)
    thoughts.allow(mask_np)
    assert mask_np[0] & 0b11111 == 0b01011


def test_text_parsers_find_the_same_end_in_every_drawn_answer(tokens):
    rng = np.random.default_rng(0)
    # Tokens that could spell the tag are drawn most often.
    likely = [*THINKER.encode("</think></think", add_special_tokens=False), CLOSE]
    for _ in range(300):
        thoughts = Thoughts(tokens, is_begun=True)
        drawn, is_closed = [], False
        for _ in range(40):
            allowed = _allowed(thoughts)
            wanted = [i for i in likely if i in allowed and (i != CLOSE or rng.random() < 0.1)]
            pool = wanted if wanted and rng.random() < 0.9 else sorted(allowed - {CLOSE})
            drawn.append(int(rng.choice(pool)))
            is_closed = thoughts.advance(drawn[-1])
            if is_closed:
                break
        shown = [i for i in drawn if THINKER.has_text(i, skip_special_tokens=True)]
        split = ReasoningParser(starts_thinking=True).feed(THINKER.decode(shown) + "answer")
        assert split.content == ("answer" if is_closed else "")


def test_without_reasoning_the_grammar_starts_at_the_first_token(tokens):
    form_np = np.zeros(NUM_WORDS, np.int32)
    form_np[0] = 0b1000
    thoughts = Thoughts(tokens, is_begun=False)
    assert _allowed(thoughts, form_np.copy()) == {3, OPEN}
    assert thoughts.advance(3)
    thoughts = Thoughts(tokens, is_begun=False)
    assert not thoughts.is_open and not thoughts.advance(OPEN)
    assert thoughts.is_open and CLOSE in _allowed(thoughts) and thoughts.advance(CLOSE)
