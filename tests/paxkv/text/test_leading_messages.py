"""The leading messages of a chat: how much of its prompt other chats share."""

import functools

import pytest

from paxkv.text.chat_template import ChatTemplate
from paxkv.text.leading_messages import count_leading_chars

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
WITH_TOOLS = "{% for t in tools or [] %}[{{ t.name }}]{% endfor %}" + PLAIN
# As templates of some models, it writes how many messages there are, or rejects short chats.
COUNTS = "{{ messages | length }}" + PLAIN
REJECTS = "{% if messages | length < 3 %}{{ raise_exception('too short') }}{% endif %}" + PLAIN

SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "What is a block?"}
ANSWER = {"role": "assistant", "content": "Memory."}


def leading(source, messages, **options):
    render = functools.partial(ChatTemplate(source).render, **options)
    text = render(messages)
    return text[: count_leading_chars(text, messages, render)]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([SYSTEM, USER], "<system>Be brief.\n<user>"),
        ([SYSTEM, USER, ANSWER, USER], "<system>Be brief.\n<user>"),
        (
            [SYSTEM, {"role": "developer", "content": "x"}, USER],
            "<system>Be brief.\n<developer>x\n<user>",
        ),
        ([USER], "<user>"),
        # No message of the user follows, so another chat may go on in any way.
        ([SYSTEM], ""),
        ([SYSTEM, ANSWER], ""),
    ],
)
def test_leading_part_ends_where_the_first_user_begins(messages, expected):
    assert leading(PLAIN, messages) == expected


def test_tools_belong_to_the_leading_part():
    assert leading(WITH_TOOLS, [USER], tools=[{"name": "find"}]) == "[find]<user>"


@pytest.mark.parametrize("source", [COUNTS, REJECTS])
def test_templates_that_look_at_the_whole_chat_share_nothing(source):
    assert leading(source, [SYSTEM, USER, ANSWER, USER]) == ""


def test_contents_in_parts_are_rendered_alike():
    parts = [{"type": "text", "text": "Be brief."}]
    messages = [{"role": "system", "content": parts}, USER]
    assert leading(PLAIN, messages) == "<system>Be brief.\n<user>"
