"""Variables of the chat template: a request's own ones come before the server's."""

import pytest

from paxkv.config.chat_template_kwargs import ChatTemplateKwargs
from paxkv.errors import ConfigError


def test_the_requests_own_come_first():
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
def test_what_is_no_variable_is_refused(fields, words):
    with pytest.raises(ConfigError, match=words):
        ChatTemplateKwargs.from_fields(fields)
