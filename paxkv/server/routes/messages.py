"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API, implemented with chats."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config.server_config import ServerConfig
from paxkv.contracts.request_output import CompletionOutput, RequestOutput
from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator
from paxkv.server.protocol.anthropic.bodies import (
    MessageBody,
    MessageDelta,
    MessageEvent,
    MessageUsage,
    ThinkingTokens,
    TokenCountBody,
)
from paxkv.server.protocol.anthropic.errors import anthropic_error
from paxkv.server.protocol.anthropic.message_writer import MessageWriter
from paxkv.server.protocol.anthropic.request import (
    messages_names,
    parse_count_tokens,
    parse_messages,
)
from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.error_response import describe_error
from paxkv.server.protocol.json_body import read_body
from paxkv.server.protocol.openai_protocol import check_model
from paxkv.server.protocol.openai_responses import UsageCounter
from paxkv.server.protocol.sse import EventStreamResponse
from paxkv.server.routes.chat import StartedChat, start_chat
from paxkv.server.routes.json_response import json_response

MESSAGES_PATH = "/v1/messages"


class MessagesRoutes:
    """The routes of Anthropic's API."""

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig) -> None:
        self._engine = engine
        self._generator = generator
        self._config = config

    def routes(self) -> list[Route]:
        return [
            Route(MESSAGES_PATH, self.create, methods=["POST"]),
            Route(f"{MESSAGES_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answers the conversation in the body, as one response or as a stream of events."""
        body, chat_body = await read_body(
            request, parse_messages, max_body_bytes=self._config.max_body_bytes
        )
        check_model(body.model, self._engine.model_info)
        chat = await start_chat(
            chat_body, self._engine, self._generator, self._config, messages_names(body)
        )
        request_id = request.state.request_id
        begun = MessageBody(
            id=f"msg_{request_id}",
            content=[],
            model=self._engine.model_info.served_model_name,
            usage=MessageUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0),
        )
        answer = _Answer(
            chat,
            begun,
            stop_sequences=body.stop_sequences or (),
            include_reasoning=chat_body.include_reasoning is not False,
        )
        if body.stream:
            return await EventStreamResponse.start(_events(answer, request_id))
        return json_response(await answer.whole())

    async def count_tokens(self, request: Request) -> Response:
        """Counts the tokens of the prompt in the body."""
        body, chat_body = await read_body(
            request, parse_count_tokens, max_body_bytes=self._config.max_body_bytes
        )
        check_model(body.model, self._engine.model_info)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise InvalidRequestError("this model was loaded without a tokenizer.")
        chat = await start_chat(
            chat_body, self._engine, self._generator, self._config, messages_names(body)
        )
        # The chat has not started to run.
        await chat.outputs.aclose()
        token_ids = await asyncio.to_thread(
            tokenizer.encode, chat.prompt_text, add_special_tokens=False
        )
        return json_response(TokenCountBody(len(token_ids)))


class _Answer:
    """Converts the engine's outputs to a message, or to the events of a stream.

    Args:
        begun: The message before it has any content.
        stop_sequences: The request's stop sequences.
        include_reasoning: False leaves out thoughts.
    """

    def __init__(
        self,
        chat: StartedChat,
        begun: MessageBody,
        *,
        stop_sequences: Sequence[str],
        include_reasoning: bool,
    ) -> None:
        self.outputs = chat.outputs
        self._begun = begun
        self._stop_sequences = stop_sequences
        make_counter = chat.make_thought_counter
        self._counts_thoughts = make_counter is not None
        self._reader = AnswerReader(
            chat.tool_use,
            starts_thinking=chat.starts_thinking,
            include_reasoning=include_reasoning,
            thought_counter=None if make_counter is None else make_counter(),
        )
        self._writer = MessageWriter()
        self._counter = UsageCounter()
        self._stop = MessageDelta(stop_reason="end_turn", stop_sequence=None)

    async def whole(self) -> MessageBody:
        """Waits for all outputs, and returns the message."""
        async with aclosing(self.outputs):
            async for _, output in self.outputs:
                self.add_output(output)
        return msgspec.structs.replace(
            self._begun,
            content=self._writer.blocks,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(),
        )

    def add_output(self, output: RequestOutput) -> list[MessageEvent]:
        """Adds an output to the message, and returns its events."""
        self._counter.set_prompt(0, output)
        self._counter.add_tokens(output)
        events: list[MessageEvent] = []
        for completion in output.outputs:
            self._reader.add_tokens(completion.token_ids)
            part = self._reader.read(completion.text, is_last=completion.finished)
            events += self._writer.write(part)
            if completion.finished:
                events += self._writer.end()
                self._stop = self._stop_of(completion)
        return events

    def first_event(self) -> MessageEvent:
        """The first event of a stream. Call this after `add_output`, which counts the prompt."""
        usage = msgspec.structs.replace(self._usage(), output_tokens=0)
        message = msgspec.structs.replace(self._begun, usage=usage)
        return MessageEvent(type="message_start", message=message)

    def last_events(self) -> list[MessageEvent]:
        """The last events of a stream."""
        return [
            MessageEvent(type="message_delta", delta=self._stop, usage=self._usage()),
            MessageEvent(type="message_stop"),
        ]

    def _stop_of(self, completion: CompletionOutput) -> MessageDelta:
        found = completion.stop_reason
        # The model's own stop strings are not stop sequences of the client.
        if isinstance(found, str) and found in self._stop_sequences:
            return MessageDelta(stop_reason="stop_sequence", stop_sequence=found)
        if completion.finish_reason == "length":
            return MessageDelta(stop_reason="max_tokens", stop_sequence=None)
        reason = "tool_use" if self._reader.num_calls else "end_turn"
        return MessageDelta(stop_reason=reason, stop_sequence=None)

    def _usage(self) -> MessageUsage:
        counter = self._counter
        usage = MessageUsage(
            input_tokens=counter.prompt_tokens - counter.cached_tokens,
            cache_read_input_tokens=counter.cached_tokens,
            output_tokens=counter.completion_tokens,
        )
        if not self._counts_thoughts:
            return usage
        details = ThinkingTokens(self._reader.num_thought_tokens)
        return msgspec.structs.replace(usage, output_tokens_details=details)


async def _events(answer: _Answer, request_id: str) -> AsyncGenerator[MessageEvent, None]:
    has_begun = False
    try:
        async with aclosing(answer.outputs):
            async for _, output in answer.outputs:
                events = answer.add_output(output)
                if not has_begun:
                    has_begun = True
                    yield answer.first_event()
                for event in events:
                    yield event
    except Exception as error:
        # Before the first event, an error can still have an HTTP status.
        if not has_begun:
            raise
        yield _error_event(error, request_id)
        return
    for event in answer.last_events():
        yield event


def _error_event(error: Exception, request_id: str) -> MessageEvent:
    found = anthropic_error(*describe_error(error), request_id=request_id)
    assert found is not None
    body = found[1]
    return MessageEvent(type="error", error=body.error, request_id=body.request_id)
