"""Fields that cannot be honored are refused by name and with the reason, or ignored and noted."""

import pytest

from paxkv.errors import UnsupportedFeatureError
from paxkv.server.protocol.anthropic.request import (
    MESSAGES_FIELDS,
    MESSAGES_IGNORED,
    parse_messages,
)
from paxkv.server.protocol.ignored_parts import IgnoredParts, ignored_parts
from paxkv.server.protocol.openai_protocol import parse_chat, parse_completion
from paxkv.server.protocol.responses.request import parse_responses
from paxkv.server.protocol.unsupported_fields import (
    CHAT_FIELDS,
    CHAT_IGNORED,
    COMPLETION_FIELDS,
    REASONS,
    RESPONSES_FIELDS,
    RESPONSES_IGNORED,
)

MESSAGES = [{"role": "user", "content": "a"}]
ROUTES = [
    (parse_completion, {"prompt": "a"}, COMPLETION_FIELDS),
    (parse_chat, {"messages": MESSAGES}, CHAT_FIELDS),
    (parse_responses, {"input": "a"}, RESPONSES_FIELDS),
    (parse_messages, {"messages": MESSAGES, "max_tokens": 1}, MESSAGES_FIELDS),
]


@pytest.mark.parametrize(
    ("parse", "body", "name", "neutral"),
    [(p, body, n, neutral) for p, body, fields in ROUTES for n, neutral in fields.items()],
)
def test_field_is_refused_by_name_except_values_that_ask_for_nothing(parse, body, name, neutral):
    for value in (None, *neutral):
        parse(body | {name: value})
    with pytest.raises(UnsupportedFeatureError) as error:
        parse(body | {name: "something"})
    assert error.value.param == name
    assert f"{name} is not supported by this version of paxkv" in str(error.value)
    assert REASONS.get(name, "") in str(error.value)


IGNORED = [
    (parse_chat, {"messages": MESSAGES}, CHAT_IGNORED),
    (parse_responses, {"input": "a"}, RESPONSES_IGNORED),
    (parse_messages, {"messages": MESSAGES, "max_tokens": 1}, MESSAGES_IGNORED),
]


@pytest.mark.parametrize(
    ("parse", "body", "name", "neutral"),
    [(p, body, n, neutral) for p, body, fields in IGNORED for n, neutral in fields.items()],
)
def test_a_field_without_effect_is_reported_unless_its_value_asks_for_nothing(
    parse, body, name, neutral
):
    ignored = IgnoredParts()
    noted = ignored.names
    token = ignored_parts.set(ignored)
    for value in (None, *neutral):
        assert parse(body | {name: value}) == parse(body)
    assert noted == []
    assert parse(body | {name: "something"}) == parse(body)
    assert noted == [name]
    ignored_parts.reset(token)


@pytest.mark.parametrize(("parse", "body"), [route[:2] for route in ROUTES[:3]])
def test_a_session_id_is_accepted_without_effect(parse, body):
    assert parse(body | {"session_id": "s"}).session_id == "s"


# Fields that vLLM 0.16 or 0.32 reads. If paxkv ignored them silently, the answer would look right.
@pytest.mark.parametrize(
    ("parse", "body", "fields"),
    [
        (
            parse_completion,
            {"prompt": "a"},
            {"thinking_token_budget": 8, "repetition_detection": {"max_pattern_size": 4}}
            | {"logprob_token_ids": [1], "return_token_offsets": True},
        ),
        (
            parse_chat,
            {"messages": MESSAGES},
            {"thinking_token_budget": 8, "repetition_detection": {"max_pattern_size": 4}}
            | {"logprob_token_ids": [1], "return_token_offsets": True, "suffix": "b"}
            | {"prompt_embeds": "AAAA"},
        ),
        (
            parse_responses,
            {"input": "a"},
            {"vllm_xargs": {"a": 1}, "mm_processor_kwargs": {"a": 1}, "include_reasoning": False},
        ),
    ],
)
def test_every_field_is_read_reported_or_refused(parse, body, fields):
    for name, value in fields.items():
        with pytest.raises(UnsupportedFeatureError, match=f"^{name} .*: {REASONS[name]}; leave"):
            parse(body | {name: value})


def test_every_reason_completes_a_sentence_and_belongs_to_a_field():
    known = {*COMPLETION_FIELDS, *CHAT_FIELDS, *RESPONSES_FIELDS}
    assert set(REASONS) <= known
    assert not [reason for reason in REASONS.values() if reason.endswith(".")]
