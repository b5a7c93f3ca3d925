"""Errors of llguidance become words that a client understands."""

import pytest

from paxkv.config.structured_outputs_params import FormField, StructuredOutputsParams
from paxkv.contracts.engine_output import NO_TOKEN_LEFT
from paxkv.errors import InvalidRequestError
from paxkv.structured_output.plain_reasons import describe_failure
from tests.paxkv.structured_output.demo_grammars import make_compiler


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"regex": "(a"},
            'structured_outputs.regex cannot be compiled: invalid regex "(a" (in regex): regex '
            "parse error: (a ^ error: unclosed group.",
        ),
        # Lines of a grammar are shown to a client that has written them.
        (
            {"grammar": "start: b"},
            'structured_outputs.grammar cannot be compiled: at 1(8): unknown name: "b" 1 | start: '
            "b ^.",
        ),
        (
            {"structural_tag": '{"format": {"type": "grammar", "grammar": "start: b"}}'},
            'structured_outputs.structural_tag cannot be compiled: unknown name: "b".',
        ),
        (
            {"structural_tag": "{"},
            "structured_outputs.structural_tag cannot be compiled: it is not JSON (Expecting "
            "property name enclosed in double quotes: line 1 column 2 (char 1)), got '{'; send a "
            "structural tag as JSON.",
        ),
        (
            {"regex": "a{1000000}"},
            "structured_outputs.regex cannot be compiled: it is too large, or repeats too much; "
            "send a simpler one.",
        ),
        (
            {"json": "{}", "whitespace_pattern": "("},
            'structured_outputs.json cannot be compiled: whitespace_pattern: invalid regex "(" (in '
            "regex): regex parse error: ( ^ error: unclosed group.",
        ),
    ],
)
def test_a_grammar_that_cannot_be_compiled(fields, message):
    with pytest.raises(InvalidRequestError) as raised:
        make_compiler().check(StructuredOutputsParams(**fields))
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (
            "NoExtensionBias\n<non-verbose/>",
            "nothing can follow the text so far: no value fits at this place; change the format so "
            "that every beginning of an answer can be completed.",
        ),
        (
            "Parser Error: Current row has 1001 items; max is 1000",
            "Parser Error: Current row has 1001 items; max is 1000; send a simpler format.",
        ),
        ('token "#" doesn\'t satisfy the grammar', "please report it with the format."),
        (NO_TOKEN_LEFT, f"{NO_TOKEN_LEFT}."),
    ],
)
def test_an_answer_that_cannot_continue_is_an_error(reason, words):
    form = StructuredOutputsParams(json="{}", sent_in=(FormField(name="response_format"),))
    message = describe_failure(form, reason, num_tokens=12)
    assert message.startswith("the grammar of response_format cannot go on after 12 tokens: ")
    assert message.endswith(words)
