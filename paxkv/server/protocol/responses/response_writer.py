"""`ResponseWriter`: converts parts of an answer to items and events of /v1/responses."""

import uuid

import msgspec

from paxkv.server.protocol.chat.answer_reader import AnswerPart, CallPart
from paxkv.server.protocol.responses.bodies import (
    FunctionCallItem,
    MessageItem,
    OutputItem,
    ReasoningItem,
    ResponseBody,
    ResponseEvent,
    TextPart,
    ThoughtPart,
)

_PART_TYPES = {MessageItem: TextPart, ReasoningItem: ThoughtPart}
# A part of the names of events about an item's text.
_NAMES = {
    MessageItem: "output_text",
    ReasoningItem: "reasoning_text",
    FunctionCallItem: "function_call_arguments",
}


class ResponseWriter:
    """Writes one answer. An item ends when the next one begins.

    Attributes:
        items: The items that have ended.
    """

    def __init__(self) -> None:
        self.items: list[OutputItem] = []
        self._num_events = 0
        # The current item, and its text so far.
        self._item: OutputItem | None = None
        self._text: list[str] = []
        # The index of the current call among the calls of the answer.
        self._call_index: int | None = None

    def begin(self, response: ResponseBody) -> list[ResponseEvent]:
        """The first events of a stream."""
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def write(self, part: AnswerPart) -> list[ResponseEvent]:
        """The events of the next part of the answer."""
        events: list[ResponseEvent] = []
        if part.reasoning:
            events += self._write_text(ReasoningItem, part.reasoning)
        for piece in part.pieces:
            if isinstance(piece, str):
                events += self._write_text(MessageItem, piece)
            else:
                events += self._write_call(piece)
        return events

    def end(self, *, is_complete: bool) -> list[ResponseEvent]:
        """Ends the last item. An answer without items gets an empty message."""
        events: list[ResponseEvent] = []
        if self._item is None and not self.items:
            events += self._begin_item(MessageItem(id=_new_id("msg"), status="", content=[]))
        return events + self._end_item("completed" if is_complete else "incomplete")

    def close(self, response: ResponseBody) -> ResponseEvent:
        """The last event of a stream."""
        return self._event(f"response.{response.status}", response=response)

    def _write_text(
        self, item_type: type[MessageItem | ReasoningItem], text: str
    ) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if not isinstance(self._item, item_type):
            prefix = "msg" if item_type is MessageItem else "rs"
            events += self._begin_item(item_type(id=_new_id(prefix), status="", content=[]))
        return [*events, self._delta(text)]

    def _write_call(self, call: CallPart) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        if self._call_index != call.index:
            events += self._begin_item(
                FunctionCallItem(
                    id=_new_id("fc"),
                    status="",
                    call_id=_new_id("call"),
                    name=call.name or "",
                    arguments="",
                )
            )
            self._call_index = call.index
        return [*events, self._delta(call.arguments)] if call.arguments else events

    def _begin_item(self, item: OutputItem) -> list[ResponseEvent]:
        events = self._end_item("completed")
        self._item, self._text, self._call_index = item, [], None
        index = len(self.items)
        shown = msgspec.structs.replace(item, status="in_progress")
        events.append(self._event("response.output_item.added", output_index=index, item=shown))
        part_type = _PART_TYPES.get(type(item))
        if part_type is not None:
            part = part_type(text="")
            events.append(self._item_event("response.content_part.added", content=True, part=part))
        return events

    def _end_item(self, status: str) -> list[ResponseEvent]:
        item, text = self._item, "".join(self._text)
        if item is None:
            return []
        name = f"response.{_NAMES[type(item)]}.done"
        events = []
        if isinstance(item, FunctionCallItem):
            item = msgspec.structs.replace(item, arguments=text, status=status)
            events.append(self._item_event(name, arguments=text, name=item.name))
        else:
            part = _PART_TYPES[type(item)](text=text)
            item = msgspec.structs.replace(item, content=[part], status=status)
            logprobs = {"logprobs": []} if isinstance(item, MessageItem) else {}
            events.append(self._item_event(name, content=True, text=text, **logprobs))
            events.append(self._item_event("response.content_part.done", content=True, part=part))
        index = len(self.items)
        events.append(self._event("response.output_item.done", output_index=index, item=item))
        self.items.append(item)
        self._item = None
        return events

    def _delta(self, text: str) -> ResponseEvent:
        self._text.append(text)
        name = f"response.{_NAMES[type(self._item)]}.delta"
        is_call = isinstance(self._item, FunctionCallItem)
        logprobs = {"logprobs": []} if isinstance(self._item, MessageItem) else {}
        return self._item_event(name, content=not is_call, delta=text, **logprobs)

    def _item_event(self, type: str, *, content: bool = False, **fields: object) -> ResponseEvent:
        if content:
            fields["content_index"] = 0
        return self._event(type, output_index=len(self.items), item_id=self._item.id, **fields)

    def _event(self, type: str, **fields: object) -> ResponseEvent:
        event = ResponseEvent(type=type, sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
