"""`ChatChoices`: converts outputs of the engine to choices of /v1/chat/completions."""

import dataclasses
from collections.abc import Callable

from msgspec import UNSET

from paxkv.contracts.request_output import CompletionOutput
from paxkv.server.protocol.chat.answer_reader import AnswerPart, AnswerReader, CallPart
from paxkv.server.protocol.chat.chat_responses import (
    ChatChoice,
    ChatDelta,
    ChatMessage,
    FunctionCall,
    ToolCall,
)
from paxkv.server.protocol.openai_protocol import ChatCompletionRequest
from paxkv.server.protocol.openai_responses import chat_logprobs, has_new_content
from paxkv.server.protocol.tool_choice import ToolUse
from paxkv.text.thought_counter import ThoughtCounter


class ChatChoices:
    """Makes the choices of one HTTP request.

    Args:
        tool_use: How the request uses tools.
        starts_thinking: Whether answers begin with thoughts; None: do not separate thoughts.
        token_bytes: Returns the bytes of a token.
        make_thought_counter: Makes a counter for one answer; None does not count thoughts.
        echoed: The end of the prompt, which is shown at the beginning of every answer.
    """

    def __init__(
        self,
        body: ChatCompletionRequest,
        tool_use: ToolUse,
        *,
        starts_thinking: bool | None,
        token_bytes: Callable[[int], bytes],
        make_thought_counter: Callable[[], ThoughtCounter] | None = None,
        echoed: str = "",
    ) -> None:
        self._body = body
        self._tool_use = tool_use
        self._echoed = echoed
        self._token_bytes = token_bytes
        self._readers = [
            AnswerReader(
                tool_use,
                starts_thinking=starts_thinking,
                include_reasoning=body.include_reasoning is not False,
                thought_counter=make_thought_counter() if make_thought_counter else None,
            )
            for _ in range(body.num_choices)
        ]

    def num_thought_tokens(self) -> int:
        """Tokens of thoughts in all choices so far."""
        return sum(reader.num_thought_tokens for reader in self._readers)

    def first_chunks(self) -> list[ChatChoice]:
        """The first chunk of each choice in a stream, with its role."""
        return [
            ChatChoice(index=index, delta=ChatDelta(role="assistant", content=self._echoed))
            for index in range(self._body.num_choices)
        ]

    def whole(self, completion: CompletionOutput) -> ChatChoice:
        """The choice of a completion that has ended."""
        reader = self._readers[completion.index]
        reader.add_tokens(completion.token_ids)
        part = reader.read(completion.text, is_last=True)
        content = self._echoed + part.content
        has_other = bool(part.calls or part.reasoning)
        message = ChatMessage(
            content=content if content or not has_other else None,
            reasoning=part.reasoning or UNSET,
            reasoning_content=part.reasoning or UNSET,
            tool_calls=[_whole_call(call) for call in part.calls] or UNSET,
        )
        return self._choice(completion, reader, message=message)

    def chunk(self, completion: CompletionOutput) -> ChatChoice | None:
        """The next chunk of a choice; None if there is nothing to send yet."""
        shows_token_ids = bool(self._body.return_token_ids)
        reader = self._readers[completion.index]
        reader.add_tokens(completion.token_ids)
        if not has_new_content(completion, shows_token_ids=shows_token_ids):
            return None
        part = reader.read(completion.text, is_last=completion.finished)
        # Text that a parser holds back is sent later. The rest of the output is sent now.
        rest = dataclasses.replace(completion, text="")
        if part.is_empty and not has_new_content(rest, shows_token_ids=shows_token_ids):
            return None
        return self._choice(completion, reader, delta=_delta(part))

    def _choice(
        self, completion: CompletionOutput, reader: AnswerReader, **content: ChatMessage | ChatDelta
    ) -> ChatChoice:
        body = self._body
        num_top = (body.top_logprobs or 0) if body.logprobs else None
        as_token_ids = bool(body.return_tokens_as_token_ids)
        return ChatChoice(
            index=completion.index,
            logprobs=chat_logprobs(
                completion, num_top, token_bytes=self._token_bytes, as_token_ids=as_token_ids
            ),
            finish_reason=self._finish_reason(completion, reader),
            stop_reason=completion.stop_reason,
            token_ids=completion.token_ids if body.return_token_ids else UNSET,
            **content,
        )

    def _finish_reason(self, completion: CompletionOutput, reader: AnswerReader) -> str | None:
        # As in OpenAI's API, the reason is "stop" if the request named the function. An answer that
        # was cut off may contain half a call.
        reports_calls = reader.num_calls > 0 and not self._tool_use.is_named
        if completion.finish_reason == "stop" and reports_calls:
            return "tool_calls"
        return completion.finish_reason


def _delta(part: AnswerPart) -> ChatDelta:
    has_other = bool(part.calls or part.reasoning)
    return ChatDelta(
        content=part.content if part.content or not has_other else UNSET,
        reasoning=part.reasoning or UNSET,
        reasoning_content=part.reasoning or UNSET,
        tool_calls=[_call_delta(call) for call in part.calls] or UNSET,
    )


def _whole_call(call: CallPart) -> ToolCall:
    return ToolCall(
        id=call.id,
        type="function",
        function=FunctionCall(name=call.name, arguments=call.arguments),
    )


def _call_delta(call: CallPart) -> ToolCall:
    if call.id is None:
        return ToolCall(index=call.index, function=FunctionCall(arguments=call.arguments))
    return ToolCall(
        index=call.index,
        id=call.id,
        type="function",
        function=FunctionCall(name=call.name, arguments=call.arguments),
    )
