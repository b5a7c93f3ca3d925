"""The counter counts tokens up to the end of the thoughts, however tokens and text arrive."""

import pytest

from paxkv.text.reasoning_parser import ReasoningParser
from paxkv.text.thought_counter import ThoughtCounter
from tests.paxkv.structured_output.demo_grammars import CLOSE, OPEN, THINKER, TOKENIZER


def _ids(text):
    """Token ids of the tokenizer without tags."""
    return TOKENIZER.encode(text, add_special_tokens=False)


def _count(token_ids, *, step, lag=0, starts_thinking=False, tokenizer=THINKER):
    """Adds `step` tokens at a time; the text of each token arrives `lag` tokens later."""
    parser = ReasoningParser(starts_thinking=starts_thinking)
    counter = ThoughtCounter(tokenizer, skip_special_tokens=True)
    num_chars = 0
    for num_tokens in range(step, len(token_ids) + step, step):
        counter.add_tokens(token_ids[num_tokens - step : num_tokens])
        is_last = num_tokens >= len(token_ids)
        text = tokenizer.decode(token_ids[: max(num_tokens - (0 if is_last else lag), 0)])
        parser.feed(text[num_chars:])
        num_chars = max(num_chars, len(text))
        if is_last:
            parser.finish()
        counter.update(parser)
    return counter.num_tokens


THOUGHTS = _ids("seven and eight")
REST = _ids("fifteen it is")


@pytest.mark.parametrize(("step", "lag"), [(1, 0), (1, 3), (4, 0), (4, 2), (1000, 0)])
@pytest.mark.parametrize(
    ("head", "tail", "starts_thinking"),
    [
        ([OPEN, *THOUGHTS, CLOSE], REST, False),
        ([OPEN, *THOUGHTS, CLOSE], [*REST, CLOSE], True),
        ([*THOUGHTS, CLOSE], REST, True),
        ([CLOSE], REST, True),
        # `</think>` in several tokens, before its own token or without it.
        ([OPEN, *THOUGHTS, *_ids("</think>")], [*REST, CLOSE, *REST], False),
        (_ids("<think>seven</think>"), REST, False),
        # Never ended.
        ([OPEN, *THOUGHTS], [], False),
        (THOUGHTS, [], True),
        ([], THOUGHTS, False),
        ([], [*THOUGHTS, CLOSE, *REST], False),
    ],
)
def test_count_includes_the_token_that_ends_the_thoughts(head, tail, starts_thinking, step, lag):
    found = _count([*head, *tail], step=step, lag=lag, starts_thinking=starts_thinking)
    assert found == len(head)


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_tags_can_consist_of_several_tokens(step):
    head = _ids("<think>seven and eight</think>")
    assert _count([*head, *REST], step=step, tokenizer=TOKENIZER) == len(head)
