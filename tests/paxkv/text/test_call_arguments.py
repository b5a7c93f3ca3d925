"""Arguments of earlier calls in the form for templates."""

import json

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.text.call_arguments import (
    MAX_DEPTH,
    CallText,
    dump_json,
    is_deep,
    template_arguments,
)
from paxkv.text.chat_template import ChatTemplate

CUT_OFF = '{"a": "one\ntwo'


def _nested(depth, value=None):
    for _ in range(depth):
        value = {"a": value}
    return value


def _render(source, arguments):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    return ChatTemplate("{% set call = messages[0].tool_calls[0] %}" + source).render(messages)


def test_json_of_an_object_becomes_an_object():
    assert template_arguments('{"a": [1.0, "ü"]}') == {"a": [1.0, "ü"]}
    assert template_arguments(None) == template_arguments("  ") == {}


@pytest.mark.parametrize(
    "text", ["{", "[1]", "5", '"a"', '{"a": 1,}', '{"a": "x"y"}', '{"a": 1e99']
)
def test_other_text_stays_unchanged(text):
    found = template_arguments(text)
    assert isinstance(found, CallText) and str(found) == text
    assert dict(found) == {"arguments": text} and "a" not in found and len(found) == 1


def test_deep_json_stays_text():
    assert template_arguments(json.dumps(_nested(MAX_DEPTH))) == _nested(MAX_DEPTH)
    for depth in (MAX_DEPTH + 1, 5_000):
        text = '{"a":' * depth + "1" + "}" * depth
        assert str(template_arguments(text)) == text
    assert not is_deep(5)
    with pytest.raises(InvalidRequestError, match="at most 200 objects and lists"):
        template_arguments(_nested(MAX_DEPTH + 1))


def test_call_text_is_written_into_json_unchanged():
    value = {"name": "f", "arguments": CallText(CUT_OFF), "next": [CallText("5"), "ü"]}
    assert dump_json(value) == f'{{"name": "f", "arguments": {CUT_OFF}, "next": [5, "ü"]}}'
    assert dump_json(CallText(CUT_OFF)) == CUT_OFF
    with pytest.raises(TypeError, match="set is not a JSON value"):
        dump_json({"a": {1}})


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        ("{{ call.function.arguments | tojson }}", CUT_OFF),
        ("{{ call.function.arguments }}", CUT_OFF),
        ("{{ call | tojson }}", f'"function": {{"name": "f", "arguments": {CUT_OFF}}}}}'),
        ("{{ 'f(' + call.function.arguments + ')' }}", f"f({CUT_OFF})"),
        ("{{ 'f(' ~ call.function.arguments ~ ')' }}", f"f({CUT_OFF})"),
        ("{% for k, v in call.function.arguments|items %}{{ k }}={{ v }};{% endfor %}",
         f"arguments={CUT_OFF};"),
        ("{{ call.function.arguments.city is defined }}", "False"),
    ],
)  # fmt: skip
def test_call_text_appears_in_templates_of_every_kind(source, shown):
    assert shown in _render(source, CUT_OFF)


def test_arguments_that_a_template_adds_to_text_become_json():
    assert _render("{{ 'f(' + call.function.arguments + ')' }}", '{"a":1}') == 'f({"a": 1})'
