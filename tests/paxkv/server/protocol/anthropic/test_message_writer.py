"""However an answer is cut into pieces, its streamed blocks add up to the whole answer."""

import json
import re

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from paxkv.server.protocol.anthropic.bodies import UNSIGNED
from paxkv.server.protocol.anthropic.message_writer import MessageWriter
from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.tool_parsers.hermes import HermesToolParser
from paxkv.text.tool_parsers.llama3_json import Llama3JsonToolParser

HERMES = '<tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>'
LLAMA = '{"name": "f", "parameters": {"a": 1}}'
ANSWERS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<think>", "</think>", "<tool_call>", "</tool_call>", HERMES, LLAMA, "; ", "\n", "<"]
        ),
        st.text(max_size=5),
    ),
    max_size=8,
).map("".join)
TOOL_USES = st.sampled_from(
    [
        ToolUse(),
        ToolUse(make_parser=HermesToolParser),
        ToolUse(make_parser=HermesToolParser, max_calls=1),
        ToolUse(make_parser=Llama3JsonToolParser),
    ]
)


def _write(pieces, tool_use, starts_thinking):
    reader, writer = AnswerReader(tool_use, starts_thinking=starts_thinking), MessageWriter()
    events = []
    for i, piece in enumerate(pieces):
        events += writer.write(reader.read(piece, is_last=i + 1 == len(pieces)))
    events += writer.end()
    return [_json(event) for event in events], writer.blocks


def _json(value):
    return json.loads(msgspec.json.encode(value))


def _blocks(events):
    """The content that a client puts together from events, as Anthropic's documentation says."""
    blocks, inputs = [], {}
    for event in events:
        kind = event["type"]
        if kind == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[event["index"]]
            if delta["type"] == "text_delta":
                block["text"] += delta["text"]
            elif delta["type"] == "thinking_delta":
                block["thinking"] += delta["thinking"]
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                assert (delta["type"], block["type"]) == ("input_json_delta", "tool_use")
                inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]
    for index, text in inputs.items():
        try:
            blocks[index]["input"] = json.loads(text)
        except ValueError:
            blocks[index]["input"] = {}
    return blocks


def _without_ids(blocks):
    return [{name: value for name, value in b.items() if name != "id"} for b in blocks]


@given(ANSWERS, TOOL_USES, st.sampled_from([None, False, True]), st.data())
def test_joined_deltas_are_the_whole_answer(text, tool_use, starts_thinking, data):
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    cuts = [0, *places, len(text)]
    pieces = [text[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    events, blocks = _write(pieces, tool_use, starts_thinking)
    shown = [_json(block) for block in blocks]
    assert _blocks(events) == shown
    for other in ([text], [*text, ""]):
        _, same = _write(other, tool_use, starts_thinking)
        assert _without_ids(shown) == _without_ids(_json(block) for block in same)
    # No block is empty, and no two of the same kind of text follow each other.
    kinds = [block["type"] for block in shown]
    assert all(a != b or a == "tool_use" for a, b in zip(kinds, kinds[1:], strict=False))


@given(ANSWERS, TOOL_USES, st.sampled_from([None, False, True]))
def test_every_block_starts_has_deltas_and_stops(text, tool_use, starts_thinking):
    events, blocks = _write([*text, ""], tool_use, starts_thinking)
    letters = {"content_block_start": "s", "content_block_delta": "d", "content_block_stop": "e"}
    order = "".join(letters.get(event["type"], "p") for event in events)
    assert re.fullmatch("(spd*e(sd*e)*)?", order)
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == list(
        range(len(blocks))
    )


def test_text_that_follows_a_call_in_the_same_piece_comes_after_it():
    text = "a" + HERMES[:40] + "|" + HERMES[40:] + " b "
    events, blocks = _write(text.split("|"), ToolUse(make_parser=HermesToolParser), None)
    assert [type(block).__name__ for block in blocks] == ["TextBlock", "ToolUseBlock", "TextBlock"]
    assert blocks[1].input == {"a": [1, "}"]} and blocks[1].id.startswith("toolu_")
    assert (blocks[0].text, blocks[2].text.strip()) == ("a", "b")
    assert events[1] == {"type": "ping"}


def test_thoughts_end_with_a_signature():
    events, blocks = _write(["<think>hm</think>so"], ToolUse(), False)
    assert blocks[0].signature == UNSIGNED != ""
    kinds = [event["delta"]["type"] for event in events if "delta" in event]
    assert kinds == ["thinking_delta", "signature_delta", "text_delta"]
    assert events[0]["content_block"] == {"type": "thinking", "thinking": "", "signature": ""}


def test_a_call_that_was_cut_off_has_the_complete_part_of_its_input():
    _, blocks = _write([HERMES[:50]], ToolUse(make_parser=HermesToolParser), None)
    assert (blocks[0].name, blocks[0].input) == ("f", {"a": [1]})
