"""`AnswerReader`: splits the text of one answer into thoughts, content and tool calls."""

import dataclasses
import uuid
from collections.abc import Sequence

from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.reasoning_parser import ReasoningParser, ReasoningSplit
from paxkv.text.thought_counter import ThoughtCounter
from paxkv.text.tool_parsers.tool_parser import CallStart, ContentPart, ToolEvent


@dataclasses.dataclass(slots=True, kw_only=True)
class CallPart:
    """New text of a tool call.

    Args:
        id: The call's id. Like `name`, only the first part of a call has it.
    """

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class AnswerPart:
    """What one piece of text adds to an answer: thoughts, then content and calls.

    Args:
        pieces: Content and parts of calls, in the order of the text.
    """

    reasoning: str = ""
    pieces: list[str | CallPart] = dataclasses.field(default_factory=list)

    @property
    def content(self) -> str:
        return "".join(piece for piece in self.pieces if isinstance(piece, str))

    @property
    def calls(self) -> list[CallPart]:
        return [piece for piece in self.pieces if isinstance(piece, CallPart)]

    @property
    def is_empty(self) -> bool:
        return not (self.reasoning or self.pieces)


class AnswerReader:
    """Reads one answer piece by piece. The joined parts do not depend on how the text is cut.

    Args:
        starts_thinking: Whether the answer begins with thoughts; None: do not separate thoughts.
        include_reasoning: False drops thoughts.
        thought_counter: Counts the tokens of thoughts; None does not count them.
    """

    def __init__(
        self,
        tool_use: ToolUse,
        *,
        starts_thinking: bool | None,
        include_reasoning: bool = True,
        thought_counter: ThoughtCounter | None = None,
    ) -> None:
        self._tool_use = tool_use
        self._include_reasoning = include_reasoning
        self._tool_parser = tool_use.make_parser() if tool_use.make_parser else None
        self._reasoning_parser = (
            None if starts_thinking is None else ReasoningParser(starts_thinking=starts_thinking)
        )
        self._thought_counter = thought_counter
        self.num_calls = 0

    @property
    def num_thought_tokens(self) -> int:
        """Tokens of thoughts so far, including the token that ends them."""
        return 0 if self._thought_counter is None else self._thought_counter.num_tokens

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Counts tokens. `read` gets their text afterwards."""
        if self._thought_counter is not None:
            self._thought_counter.add_tokens(token_ids)

    def read(self, text: str, *, is_last: bool) -> AnswerPart:
        """Reads the next piece of text, and returns the parts that are now certain."""
        split = ReasoningSplit(content=text)
        if self._reasoning_parser is not None:
            split = self._reasoning_parser.feed(text)
            if is_last:
                rest = self._reasoning_parser.finish()
                split = ReasoningSplit(
                    split.reasoning + rest.reasoning, split.content + rest.content
                )
            if self._thought_counter is not None:
                self._thought_counter.update(self._reasoning_parser)
        part = AnswerPart(reasoning=split.reasoning if self._include_reasoning else "")
        if self._tool_parser is None:
            part.pieces += [split.content] if split.content else []
            return part
        events = self._tool_parser.feed(split.content)
        if is_last:
            events += self._tool_parser.finish()
        for event in events:
            self._add_event(event, part)
        return part

    def _add_event(self, event: ToolEvent, part: AnswerPart) -> None:
        if isinstance(event, ContentPart):
            part.pieces += [event.text] if event.text else []
            return
        max_calls = self._tool_use.max_calls
        if max_calls is not None and event.index >= max_calls:
            return
        if isinstance(event, CallStart):
            self.num_calls += 1
            call_id = f"chatcmpl-tool-{uuid.uuid4().hex}"
            part.pieces.append(CallPart(index=event.index, id=call_id, name=event.name))
            return
        last = part.pieces[-1] if part.pieces else None
        if isinstance(last, CallPart) and last.index == event.index:
            last.arguments += event.text
        else:
            part.pieces.append(CallPart(index=event.index, arguments=event.text))
