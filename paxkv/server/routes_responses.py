"""POST /v1/responses: OpenAI's newer form of a chat. Nothing of it is stored."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config import ServerConfig
from paxkv.contracts.request_output import RequestOutput
from paxkv.server.answer_reader import AnswerReader
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator
from paxkv.server.json_body import read_json_object
from paxkv.server.openai_protocol import check_model
from paxkv.server.openai_responses import UsageCounter
from paxkv.server.response_writer import ResponseWriter
from paxkv.server.responses_bodies import (
    CachedTokens,
    IncompleteDetails,
    ResponseBody,
    ResponseEvent,
    ResponseUsage,
)
from paxkv.server.responses_protocol import ResponsesRequest, parse_responses
from paxkv.server.routes_chat import StartedChat, start_chat
from paxkv.server.sse import EventStreamResponse


class ResponsesRoutes:
    """The route of responses."""

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig) -> None:
        self._engine = engine
        self._generator = generator
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answers the input of the body, in one piece or as a stream of events."""
        fields = await read_json_object(request, max_body_bytes=self._config.max_body_bytes)
        body, chat_body = parse_responses(fields)
        check_model(chat_body.model, self._engine.model_info.served_model_name)
        chat = await start_chat(chat_body, self._engine, self._generator, self._config)
        begun = self._begun(body, f"resp_{chat_body.request_id or request.state.request_id}")
        answer = _Answer(chat)
        if body.stream:
            return await EventStreamResponse.start(_events(chat, answer, begun))
        async with aclosing(chat.outputs):
            async for _, output in chat.outputs:
                answer.take(output)
        return Response(msgspec.json.encode(answer.finished(begun)), media_type="application/json")

    def _begun(self, body: ResponsesRequest, response_id: str) -> ResponseBody:
        """The answer as it is told of before it has any text."""
        return ResponseBody(
            id=response_id,
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._engine.model_info.served_model_name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or {"effort": None, "summary": None},
            temperature=1.0 if body.temperature is None else body.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_p=1.0 if body.top_p is None else body.top_p,
            user=body.user,
        )


class _Answer:
    """Puts the outputs of the engine together, whole or in parts."""

    def __init__(self, chat: StartedChat) -> None:
        self.writer = ResponseWriter()
        self._reader = AnswerReader(chat.tool_use, starts_thinking=chat.starts_thinking)
        self._usage = UsageCounter()
        self._finish_reason: str | None = None

    def take(self, output: RequestOutput) -> list[ResponseEvent]:
        """What an output brings."""
        self._usage.note_prompt(0, output)
        self._usage.add_tokens(output)
        events: list[ResponseEvent] = []
        for completion in output.outputs:
            self._finish_reason = completion.finish_reason
            part = self._reader.read(completion.text, is_last=completion.finished)
            events += self.writer.write(part)
            if completion.finished:
                events += self.writer.end(is_complete=completion.finish_reason == "stop")
        return events

    def finished(self, begun: ResponseBody) -> ResponseBody:
        is_complete = self._finish_reason == "stop"
        usage = self._usage.usage()
        return msgspec.structs.replace(
            begun,
            status="completed" if is_complete else "incomplete",
            incomplete_details=None if is_complete else IncompleteDetails("max_output_tokens"),
            output=self.writer.items,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=CachedTokens(self._usage.cached_tokens),
                output_tokens=usage.completion_tokens,
                total_tokens=usage.total_tokens,
            ),
        )


async def _events(
    chat: StartedChat, answer: _Answer, begun: ResponseBody
) -> AsyncGenerator[ResponseEvent, None]:
    first = answer.writer.begin(begun)
    async with aclosing(chat.outputs):
        async for _, output in chat.outputs:
            # Behind the first output: what fails before it still gets an HTTP status of its own.
            for event in (*first, *answer.take(output)):
                yield event
            first = []
    yield answer.writer.close(answer.finished(begun))
