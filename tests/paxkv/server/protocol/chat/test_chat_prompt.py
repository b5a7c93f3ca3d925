"""Messages become prompt text through the checkpoint's own template."""

import types

import pytest

from paxkv.errors import InvalidRequestError
from paxkv.server.protocol.chat.chat_prompt import render_chat
from paxkv.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]


def _engine(source):
    # The template is the real one: the server's Protocol must fit it.
    return types.SimpleNamespace(chat_template=ChatTemplate(source))


def test_variables_of_the_request_reach_the_template():
    engine = _engine(
        "{{ messages[0].content }}{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}"
    )
    kwargs = {"enable_thinking": 7}
    chat = render_chat(engine, MESSAGES, add_generation_prompt=True, template_kwargs=kwargs)
    assert chat.text == "hi>7" and chat.num_leading_chars is None
    assert render_chat(engine, MESSAGES, add_generation_prompt=False).text == "hi"


@pytest.mark.parametrize(
    "name", ["messages", "add_generation_prompt", "tools", "documents", "self", "template_kwargs"]
)
def test_template_variables_of_any_name_do_not_break_the_server(name):
    engine = _engine("{{ messages[0].content }}")
    try:
        text = render_chat(
            engine, MESSAGES, add_generation_prompt=True, template_kwargs={name: "x"}
        ).text
    except InvalidRequestError as error:
        assert error.param == "chat_template_kwargs"
        assert name in str(error)
    else:
        assert text == "hi"


@pytest.mark.parametrize(
    ("source", "prompt"),
    [
        ("{% for m in messages %}{{ m.content }}<end> {% endfor %}", "hi <end> So: "),
        # Where the template takes away the space, the answer goes on without.
        ("{% for m in messages %}{{ m.content | trim }}<end> {% endfor %}", "hi<end> So:"),
    ],
)
def test_a_continued_message_ends_as_the_template_writes_it(source, prompt):
    messages = [{"role": "user", "content": "hi "}, {"role": "assistant", "content": "So: "}]
    text = render_chat(
        _engine(source), messages, add_generation_prompt=False, continue_final_message=True
    ).text
    assert text == prompt
