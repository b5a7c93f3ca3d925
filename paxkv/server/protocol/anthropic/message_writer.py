"""`MessageWriter`: converts parts of an answer to blocks and events of Anthropic's API."""

import uuid

import msgspec

from paxkv.server.protocol.anthropic.bodies import (
    UNSIGNED,
    BlockDelta,
    ContentBlock,
    InputJsonDelta,
    MessageEvent,
    SignatureDelta,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
)
from paxkv.server.protocol.anthropic.partial_json import complete_part
from paxkv.server.protocol.chat.answer_reader import AnswerPart, CallPart
from paxkv.text.call_arguments import is_deep


class MessageWriter:
    """Writes the content of one answer. A block ends when the next one begins.

    Attributes:
        blocks: The blocks that have ended.
    """

    def __init__(self) -> None:
        self.blocks: list[ContentBlock] = []
        # The current block as it began, and its text so far.
        self._block: ContentBlock | None = None
        self._text: list[str] = []
        # The index of the latest call among the calls of the answer.
        self._call_index: int | None = None

    def write(self, part: AnswerPart) -> list[MessageEvent]:
        """The events of the next part of the answer."""
        events: list[MessageEvent] = []
        if part.reasoning:
            if not isinstance(self._block, ThinkingBlock):
                events += self._begin(ThinkingBlock(thinking="", signature=""))
            events.append(self._delta(ThinkingDelta(thinking=part.reasoning), part.reasoning))
        for piece in part.pieces:
            if isinstance(piece, CallPart):
                events += self._write_call(piece)
                continue
            if not isinstance(self._block, TextBlock):
                events += self._begin(TextBlock(text=""))
            events.append(self._delta(TextDelta(text=piece), piece))
        return events

    def end(self) -> list[MessageEvent]:
        """Ends the last block."""
        block, text = self._block, "".join(self._text)
        if block is None:
            return []
        events: list[MessageEvent] = []
        if isinstance(block, ThinkingBlock):
            block = ThinkingBlock(thinking=text, signature=UNSIGNED)
            events.append(self._delta(SignatureDelta(signature=UNSIGNED), ""))
        elif isinstance(block, TextBlock):
            block = TextBlock(text=text)
        else:
            block = msgspec.structs.replace(block, input=_input(text))
        events.append(MessageEvent(type="content_block_stop", index=len(self.blocks)))
        self.blocks.append(block)
        self._block, self._text = None, []
        return events

    def _write_call(self, call: CallPart) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if self._call_index != call.index:
            call_id = f"toolu_{uuid.uuid4().hex}"
            events += self._begin(ToolUseBlock(id=call_id, name=call.name or "", input={}))
            self._call_index = call.index
        if call.arguments:
            delta = InputJsonDelta(partial_json=call.arguments)
            events.append(self._delta(delta, call.arguments))
        return events

    def _begin(self, block: ContentBlock) -> list[MessageEvent]:
        events = self.end()
        self._block = block
        index = len(self.blocks)
        events.append(MessageEvent(type="content_block_start", index=index, content_block=block))
        if index == 0:
            events.append(MessageEvent(type="ping"))
        return events

    def _delta(self, delta: BlockDelta, text: str) -> MessageEvent:
        self._text.append(text)
        return MessageEvent(type="content_block_delta", index=len(self.blocks), delta=delta)


def _input(arguments: str) -> object:
    """The input of a call; if its JSON was cut off, only its complete members."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        found = complete_part(arguments)
        found = found if isinstance(found, dict) else {}
    # The server would refuse a deeper value when the client sends it back.
    return {} if is_deep(found) else found
