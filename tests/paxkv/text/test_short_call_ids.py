"""Ids of calls are shortened only for templates that need it."""

import pytest

from paxkv.text.chat_template import ChatTemplate
from paxkv.text.short_call_ids import needs_short_ids, short_id

SHOW = (
    "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }}"
    "{% endfor %};{% endfor %}"
)
CHECK = "{% if messages[0].tool_calls[0].id|length != 9 %}{{ raise_exception('nine') }}{% endif %}"
MESSAGES = [
    {
        "role": "assistant",
        "tool_calls": [{"id": "chatcmpl-tool-0123456789abcdef", "function": {"name": "f"}}],
    },
    {"role": "tool", "tool_call_id": "chatcmpl-tool-0123456789abcdef", "content": "5"},
]


@pytest.mark.parametrize(
    ("given", "expected"),
    [("call_a1B2c3D4e5", "1B2c3D4e5"), ("a1B2c3D4e", "a1B2c3D4e"), ("f:0", "0000000f0")],
)
def test_short_id_is_the_end_of_the_id(given, expected):
    assert short_id(given) == expected


def test_template_that_requires_nine_characters_gets_short_ids():
    assert ChatTemplate(CHECK + SHOW).render(MESSAGES) == "789abcdef;789abcdef;"
    whole = MESSAGES[1]["tool_call_id"]
    assert ChatTemplate(SHOW).render(MESSAGES) == f"{whole};{whole};"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% if not tool_call.id is defined or tool_call.id|length != 9 %}", True),
        ("{% if message.tool_call_id | length != 9 %}", True),
        ("{% if tool_call['id']|length != 9 %}", True),
        ("{% if grid|length != 9 %}", False),
        ("{% if messages | length != 9 %}", False),
        ("{% if tool_call.id|length != 90 %}", False),
    ],
)
def test_check_of_the_id_length_is_found_in_templates(source, expected):
    assert needs_short_ids(source) is expected
