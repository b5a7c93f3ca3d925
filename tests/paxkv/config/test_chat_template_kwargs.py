"""Variables of the chat template: a request's variables override the server's."""

import pytest

from paxkv.config.chat_template_kwargs import ChatTemplateKwargs
from paxkv.errors import ConfigError


def test_variables_of_the_request_override_the_servers():
    kwargs = ChatTemplateKwargs.from_fields({"enable_thinking": False, "a": 1})
    assert kwargs.with_request({"a": 2, "b": 3}) == {"enable_thinking": False, "a": 2, "b": 3}
    assert kwargs.with_request(None) == {"enable_thinking": False, "a": 1}
    assert ChatTemplateKwargs().with_request(None) == {}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ([], "expected a JSON object"),
        ("enable_thinking", "expected a JSON object"),
        ({"messages": [], "tools": []}, "must not set messages, tools"),
    ],
)
def test_reserved_names_and_other_types_are_rejected(fields, words):
    with pytest.raises(ConfigError, match=words):
        ChatTemplateKwargs.from_fields(fields)
