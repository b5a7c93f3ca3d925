"""A grammar in which an answer cannot go on is found out before there are any answers."""

import json

import llguidance
import pytest

from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.grammar_walk import find_dead_end
from tests.paxkv.structured_output.demo_grammars import EOS, SETUP

TOKENIZER = make_grammar_tokenizer(**SETUP)
X = {"type": "object", "patternProperties": {"^x$": {"const": 1}}, "additionalProperties": False}
# Behind the first name there is no further one, which llguidance does not see.
DEAD = {**X, "required": ["x"]}


def _find(schema):
    options = {"whitespace_flexible": False}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    return find_dead_end(matcher, TOKENIZER, eos_token_ids=[EOS], is_json=True)


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (DEAD, '{"x":1,'),
        (
            {
                "type": "object",
                "properties": {"first": {"const": 0}, "second": DEAD},
                "required": ["first", "second"],
                "additionalProperties": False,
            },
            '{"first":0,"second":{"x":1,',
        ),
    ],
)
def test_a_dead_end_after_other_properties_is_found(schema, text):
    assert _find(schema).endswith(f"(after {text!r})")


@pytest.mark.parametrize("schema", [X, {}, {"type": "array", "items": {"type": "string"}}], ids=str)
def test_a_grammar_without_a_dead_end_passes(schema):
    assert _find(schema) is None


def test_a_search_for_dead_ends_does_not_advance_the_matcher():
    matcher = llguidance.LLMatcher(TOKENIZER, llguidance.grammar_from("regex", "[ab]{2}"))
    assert find_dead_end(matcher, TOKENIZER, eos_token_ids=[EOS], is_json=False) is None
    assert matcher.consume_tokens(TOKENIZER.tokenize_str("ab")) and matcher.is_accepting()
