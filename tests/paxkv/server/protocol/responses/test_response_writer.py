"""Items of /v1/responses have the order of the text, whatever one piece of it contains."""

from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.responses.bodies import FunctionCallItem, MessageItem
from paxkv.server.protocol.responses.response_writer import ResponseWriter
from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.tool_parsers.hermes import HermesToolParser

CALL = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'


def _write(pieces):
    reader = AnswerReader(ToolUse(make_parser=HermesToolParser), starts_thinking=None)
    writer = ResponseWriter()
    for i, piece in enumerate(pieces):
        writer.write(reader.read(piece, is_last=i + 1 == len(pieces)))
    writer.end(is_complete=True)
    return [
        (item.name, item.arguments)
        if isinstance(item, FunctionCallItem)
        else "".join(part.text for part in item.content)
        for item in writer.items
        if isinstance(item, FunctionCallItem | MessageItem)
    ]


def test_text_that_follows_a_call_in_the_same_piece_comes_after_it():
    text = f"a{CALL}b"
    for cut in range(len(text) + 1):
        assert _write([text[:cut], text[cut:]]) == ["a", ("f", '{"a": 1}'), "b"]
