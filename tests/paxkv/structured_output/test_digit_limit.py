"""Numbers in JSON answers have a limited number of digits."""

import pytest

from paxkv.structured_output.digit_limit import MAX_DIGITS, DigitLimit
from paxkv.structured_output.grammar_manager import GrammarManager
from paxkv.structured_output.token_limits import token_bits
from tests.paxkv.structured_output.demo_grammars import (
    TOKENIZER,
    VOCAB_SIZE,
    allowed_ids,
    make_compiler,
)
from tests.paxkv.structured_output.test_grammar_manager import add_request

COMPILER = make_compiler()
NUM_WORDS = VOCAB_SIZE // 32
DIGITS = {i for i in range(TOKENIZER.vocab_size) if TOKENIZER.token_text(i)[:1].isdigit()}
FULL = "1" * MAX_DIGITS


def _is_limited(text, *, others=True):
    """Whether no digit may follow a text."""
    limit = DigitLimit(COMPILER.token_texts(), NUM_WORDS)
    for token_id in TOKENIZER.encode(text, add_special_tokens=False):
        limit.advance(token_id)
    before_np = token_bits(range(TOKENIZER.vocab_size) if others else DIGITS, NUM_WORDS)
    mask_np = before_np.copy()
    limit.narrow(mask_np)
    if (mask_np == before_np).all():
        return False
    assert (mask_np == before_np & ~token_bits(DIGITS, NUM_WORDS)).all()
    return True


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FULL, True),
        (FULL[1:], False),
        (f'{{"a": -{FULL}', True),
        (f"[0.{FULL}", True),
        (f"[{FULL[1:]}.{FULL[1:]}", False),
        (f"[1e-{FULL}", True),
        (f"[{FULL}, 1", False),
        (f'["{FULL}', False),
        (f'["\\"{FULL}', False),
        (f'["\\\\", {FULL}', True),
        (f'{{"{FULL}": {FULL[1:]}', False),
    ],
)
def test_digits_of_numbers_are_counted_outside_of_strings(text, expected):
    assert _is_limited(text) is expected


def test_digits_of_a_number_that_must_be_longer_are_not_limited():
    assert not _is_limited(FULL, others=False)


@pytest.mark.parametrize(
    "fields",
    [{"json": {"type": "number"}}, {"json": {"type": "integer"}}, {"json_object": True}],
    ids=str,
)
def test_an_answer_of_digits_ends(fields):
    manager = GrammarManager(COMPILER)
    add_request(manager, "a", **fields)
    begin = '{"a":' if "json_object" in fields else ""
    for token_id in TOKENIZER.encode(begin, add_special_tokens=False):
        manager.advance("a", [token_id])
    one = TOKENIZER.token_to_id("1")
    for _ in range(MAX_DIGITS):
        assert one in allowed_ids(manager.make_bitmask(["a"]))
        manager.advance("a", [one])
    assert not DIGITS.intersection(allowed_ids(manager.make_bitmask(["a"])))
    manager.close()


def test_a_regular_expression_may_have_any_number_of_digits():
    manager = GrammarManager(COMPILER)
    add_request(manager, "a", regex="[0-9]+")
    one = TOKENIZER.token_to_id("1")
    for _ in range(2 * MAX_DIGITS):
        manager.advance("a", [one])
    assert one in allowed_ids(manager.make_bitmask(["a"]))
    manager.close()
