"""Whatever the routes answer, they accept as an earlier message, and templates show its calls."""

import functools
import json

import msgspec
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from paxkv.contracts.request_output import CompletionOutput
from paxkv.server.protocol.anthropic.message_writer import MessageWriter
from paxkv.server.protocol.anthropic.request import parse_messages
from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.chat.chat_choices import ChatChoices
from paxkv.server.protocol.chat.chat_messages import chat_messages
from paxkv.server.protocol.openai_protocol import parse_chat
from paxkv.server.protocol.responses.request import chat_of_responses, parse_responses
from paxkv.server.protocol.responses.response_writer import ResponseWriter
from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.call_arguments import CallText
from paxkv.text.chat_template import ChatTemplate
from paxkv.text.tool_parsers.forced_call import CallListParser, NamedCallParser
from paxkv.text.tool_parsers.hermes import HermesToolParser
from paxkv.text.tool_parsers.llama3_json import Llama3JsonToolParser

# Each with how an answer begins a call there.
TOOL_USES = {
    "none": (ToolUse(), ""),
    "hermes": (
        ToolUse(make_parser=HermesToolParser),
        '<tool_call>{"name": "f", "arguments": ',
    ),
    "one_call": (
        ToolUse(make_parser=HermesToolParser, max_calls=1),
        '<tool_call>{"arguments": [], "name": "f"}</tool_call><tool_call>{"name": "g", ',
    ),
    "llama3_json": (
        ToolUse(make_parser=Llama3JsonToolParser),
        '{"name": "f", "parameters": ',
    ),
    "required": (
        ToolUse(make_parser=CallListParser),
        '[{"name": "f", "parameters": {}}, {"name": "g", "parameters": ',
    ),
    "named": (
        ToolUse(make_parser=functools.partial(NamedCallParser, "f"), is_named=True),
        "",
    ),
}
# What the templates of models do with the arguments of a call.
SHOWN = {
    "text": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "json": "{{ a | tojson }}",
    "whole": "{{ call.function | tojson(indent=2) }}",
    "added": "{{ 'calls ' + call.function.name + ': ' + a }}",
    "members": "{% for k, v in a.items() %}<{{ k }}>{{ v }}{% endfor %}",
    "sorted": "{% for k, v in a | dictsort %}<{{ k }}>{{ v | string }}{% endfor %}",
    "keys": "{% for k in a %}{{ k }}={{ a[k] }}{% endfor %}",
}
TEMPLATES = {
    name: ChatTemplate(
        "{% for m in messages %}[{{ m.role }}]{{ m.reasoning }}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set a = call.function.arguments %}"
        f"{source}{{% endfor %}}{{% endfor %}}"
    )
    for name, source in SHOWN.items()
}
FRAGMENTS = st.one_of(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "hm",
            " ",
            "\n",
            '<tool_call>{"name": "f", "arguments": ',
            '{"name": "g h\\n", "parameters": ',
            '[{"name": "f", "parameters": ',
            '{"arguments": {"a": 1}, "name": "f"}',
            "}</tool_call>",
            "</tool_call>",
            "<|python_tag|>",
            '{"a": "one\ntwo"}',
            '{"a": "say "hi" now"}',
            '{"a": 1,}',
            '{"a": [1, {"b": "x',
            '{"a": "\\ud800"}',
            '{"a": 1e999}',
            '{"a": NaN}',
            '{"a": {}}',
            '{"a": ' * 300,
            "[" * 2000,
            "[1, 2]",
            "-4",
            "null",
            '"text"',
            "}",
            '"',
            ";",
            "ü€",
        ]
    ),
    st.text(max_size=8),
)


def _pieces(text, cuts):
    ends = sorted({cut % (len(text) + 1) for cut in cuts} | {len(text)})
    return [text[i:k] for i, k in zip([0, *ends], ends, strict=False)]


def _reader(tool_use, starts_thinking):
    return AnswerReader(tool_use, starts_thinking=starts_thinking)


def _outputs(pieces):
    last = len(pieces) - 1
    return [
        CompletionOutput(
            index=0, text=p, token_ids=[], finish_reason="length" if k == last else None
        )
        for k, p in enumerate(pieces)
    ]


def _sent(value):
    """As a client gets it."""
    return msgspec.json.decode(msgspec.json.encode(value))


def _chat_message(pieces, tool_use, starts_thinking, *, is_stream):
    body = parse_chat({"messages": [{"role": "user", "content": "go"}]})
    choices = ChatChoices(
        body, tool_use, starts_thinking=starts_thinking, token_bytes=lambda _token_id: b""
    )
    if not is_stream:
        return _sent(choices.whole(*_outputs(pieces)).message)
    message = {"content": None, "tool_calls": []}
    for chunk in [*choices.first_chunks(), *map(choices.chunk, _outputs(pieces))]:
        delta = {} if chunk is None else _sent(chunk.delta)
        for call in delta.pop("tool_calls", []):
            # As clients put them together, which keep the index.
            if "id" in call:
                message["tool_calls"].append(call)
            else:
                function = message["tool_calls"][call["index"]]["function"]
                function["arguments"] += call["function"]["arguments"]
        for name, text in delta.items():
            message[name] = (message.get(name) or "") + text
    return message


def _message_blocks(pieces, tool_use, starts_thinking, *, is_stream):
    reader, writer = _reader(tool_use, starts_thinking), MessageWriter()
    events = []
    for k, piece in enumerate(pieces):
        events += writer.write(reader.read(piece, is_last=k == len(pieces) - 1))
    events += writer.end()
    if not is_stream:
        return _sent(writer.blocks)
    # As a client that keeps the JSON of inputs as text.
    blocks, inputs = [], {}
    for found in map(_sent, events):
        if found["type"] == "content_block_start":
            blocks.append(found["content_block"])
        elif found["type"] == "content_block_delta":
            delta = {name: text for name, text in found["delta"].items() if name != "type"}
            ((name, text),) = delta.items()
            if name == "partial_json":
                inputs[found["index"]] = inputs.get(found["index"], "") + text
            else:
                blocks[-1][name] += text
    return [b | ({"input": inputs[k]} if k in inputs else {}) for k, b in enumerate(blocks)]


def _response_items(pieces, tool_use, starts_thinking, *, is_stream):
    reader, writer = _reader(tool_use, starts_thinking), ResponseWriter()
    events = []
    for k, piece in enumerate(pieces):
        events += writer.write(reader.read(piece, is_last=k == len(pieces) - 1))
    events += writer.end(is_complete=False)
    if not is_stream:
        return _sent(writer.items)
    return [_sent(e.item) for e in events if e.type == "response.output_item.done"]


def _calls(tool_use, starts_thinking, text):
    """Name and arguments of each call, as the parser hands them on."""
    part = _reader(tool_use, starts_thinking).read(text, is_last=True)
    return [(call.name, call.arguments) for call in part.calls]


def _check(messages, calls):
    """Roles of the messages, which must show the calls in every template.

    Args:
        calls: Name and arguments; None instead of arguments compares the names alone.
    """
    checked = chat_messages(messages)
    found = [call["function"] for m in checked for call in m.get("tool_calls", ())]
    assert [call["name"] for call in found] == [name for name, _ in calls]
    rendered = {name: template.render(checked) for name, template in TEMPLATES.items()}
    for call, (_, text) in zip(found, calls, strict=True):
        if text is None:
            continue
        if isinstance(call["arguments"], CallText):
            assert str(call["arguments"]) == text
            assert all(text in shown for shown in rendered.values())
        else:
            assert call["arguments"] == (json.loads(text) if text.strip() else {})
    return [message["role"] for message in checked]


@given(
    tool_use=st.sampled_from(sorted(TOOL_USES)),
    starts_thinking=st.sampled_from([None, False, True]),
    thoughts=st.sampled_from(["", "<think>hm</think>", "hm</think>so: "]),
    begins_call=st.booleans(),
    rest=st.lists(FRAGMENTS, max_size=8),
    cuts=st.lists(st.integers(0, 10_000), max_size=5),
)
@example("hermes", None, "", True, ['{"a": "x'], [])
@example("hermes", None, "", True, ["[1]}</tool_call>"], [])
@example("hermes", None, "", True, ['{"a": 1,}'], [9])
@example("hermes", None, "", True, ["{}}</tool_call> so"], [])
@example("named", None, "", True, ["-4"], [])
@example("named", None, "", True, ['{"a": ' * 900 + "1" + "}" * 900], [])
@example("named", None, "", True, ["{" + '"a": [' * 990], [])
@settings(max_examples=150)
def test_any_answer_is_accepted_as_history(
    tool_use, starts_thinking, thoughts, begins_call, rest, cuts
):
    tool_use, beginning = TOOL_USES[tool_use]
    text = "".join([thoughts, beginning if begins_call else "", *rest])
    calls = _calls(tool_use, starts_thinking, text)
    event(f"{len(calls)} calls")
    user, more = {"role": "user", "content": "go"}, {"role": "user", "content": "on"}
    whole, pieces = [text], _pieces(text, cuts)
    for is_stream, given_pieces in ((False, whole), (True, pieces)):
        options = {"is_stream": is_stream}
        message = _chat_message(given_pieces, tool_use, starts_thinking, **options)
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": None}
            for call in message.get("tool_calls") or ()
        ]
        body = parse_chat({"messages": [user, message, *results, more]})
        roles = ["user", "assistant", *["tool"] * len(calls), "user"]
        assert _check(body.messages, calls) == roles

        items = _response_items(given_pieces, tool_use, starts_thinking, **options)
        results = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "5"}
            for item in items
            if item["type"] == "function_call"
        ]
        fields = {"input": [user, *items, *results, more]}
        chat = chat_of_responses(fields, parse_responses(fields))
        # One answer is one message there too.
        assert _check(chat.messages, calls) == roles

        blocks = _message_blocks(given_pieces, tool_use, starts_thinking, **options)
        results = [
            {"type": "tool_result", "tool_use_id": block["id"]}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        content = [*results, {"type": "text", "text": "on"}]
        fields = {
            "messages": [
                user,
                {"role": "assistant", "content": blocks},
                {"role": "user", "content": content},
            ],
            "max_tokens": 5,
        }
        # A body is JSON again.
        _, chat = parse_messages(_sent(fields))
        # Inputs of a whole answer have no more than the members that are complete.
        known = calls if is_stream else [(name, None) for name, _ in calls]
        assert _check(chat.messages, known) == roles
