"""/v1/responses: OpenAI's newer API for chats, with answers that are stored for a while."""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config.sampling_params import SamplingParams
from paxkv.config.server_config import ServerConfig
from paxkv.contracts.request_output import RequestOutput
from paxkv.errors import EngineDeadError, InvalidRequestError, UnsupportedFeatureError
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator
from paxkv.server.protocol.chat.answer_reader import AnswerReader
from paxkv.server.protocol.error_response import ErrorBody, describe_error, error_body
from paxkv.server.protocol.json_body import read_body
from paxkv.server.protocol.openai_protocol import check_model
from paxkv.server.protocol.openai_responses import ReasoningTokens, UsageCounter
from paxkv.server.protocol.responses.bodies import (
    DeletedResponseBody,
    IncompleteDetails,
    ResponseBody,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
)
from paxkv.server.protocol.responses.request import (
    ResponsesRequest,
    chat_of_responses,
    input_items,
    parse_responses,
    responses_names,
)
from paxkv.server.protocol.responses.response_store import ResponseStore
from paxkv.server.protocol.responses.response_writer import ResponseWriter
from paxkv.server.protocol.sse import EventStreamResponse
from paxkv.server.routes.chat import StartedChat, start_chat
from paxkv.server.routes.json_response import json_response

_UNSAFE_IN_PATH = re.compile(r"[^A-Za-z0-9_.-]")


class ResponsesRoutes:
    """The routes of responses."""

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig) -> None:
        self._engine = engine
        self._generator = generator
        self._config = config
        self._store = ResponseStore(config.response_store_bytes)
        # Response id -> task that makes this response in the background.
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_closed = False

    def routes(self) -> list[Route]:
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            # One route for both methods; with two, "method not allowed" would name only the first.
            Route(
                "/v1/responses/{response_id}",
                self.retrieve_or_delete,
                methods=["GET", "DELETE"],
            ),
            Route("/v1/responses/{response_id}/cancel", self.cancel, methods=["POST"]),
        ]

    def close(self) -> None:
        """Cancels background responses. Called when the server begins to drain.

        No client can fetch them any more, and they would delay the requests that clients wait for.
        """
        self._is_closed = True
        for task in self._tasks.values():
            task.cancel()

    async def create(self, request: Request) -> Response:
        """Answers the input in the body: at once, as a stream of events, or in the background."""
        fields, body = await read_body(
            request,
            lambda fields: (fields, parse_responses(fields)),
            max_body_bytes=self._config.max_body_bytes,
        )
        earlier_items: list[dict[str, object]] = []
        if body.previous_response_id is not None:
            self._store.check_enabled("previous_response_id")
            earlier_items = self._store.conversation(body.previous_response_id)
        if body.background:
            self._store.check_enabled("background")
        chat_body = await asyncio.to_thread(chat_of_responses, fields, body, earlier_items)
        check_model(chat_body.model, self._engine.model_info)
        chat = await start_chat(
            chat_body, self._engine, self._generator, self._config, responses_names(body)
        )
        # The Responses API has no beam search.
        assert isinstance(chat.sampling_params, SamplingParams)
        begun = self._begun(body, chat.sampling_params, _new_id(chat_body.request_id))
        answer = _Answer(chat, begun, [*earlier_items, *input_items(body)])
        if body.background:
            if self._is_closed:
                raise EngineDeadError("the server is shutting down.")
            self._generator.check_room(1)
            self._store.put_running(begun, answer.items)
            self._start_in_background(answer)
            return json_response(begun)
        if body.stream:
            return await EventStreamResponse.start(self._events(answer))
        return json_response(self._stored(await answer.whole(), answer))

    async def retrieve_or_delete(self, request: Request) -> Response:
        """Calls `retrieve` or `delete`."""
        handle = self.delete if request.method == "DELETE" else self.retrieve
        return await handle(request)

    async def retrieve(self, request: Request) -> Response:
        """Returns a stored response in its current state."""
        if request.query_params.get("stream", "false") != "false":
            raise UnsupportedFeatureError(
                "a stored response is not streamed; leave stream out.", param="stream"
            )
        body = self._store.get(request.path_params["response_id"]).body
        return Response(body, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """Cancels a response that is being made in the background."""
        response_id = request.path_params["response_id"]
        entry = self._store.get(response_id)
        task = self._tasks.get(response_id)
        if task is None or not entry.is_running:
            raise InvalidRequestError(
                f"the response {response_id!r} is {entry.status}; only a response that is being "
                "made in the background can be cancelled.",
                param="response_id",
            )
        await _cancel(task)
        return Response(self._store.get(response_id).body, media_type="application/json")

    async def delete(self, request: Request) -> Response:
        """Deletes a stored response; if it is being made in the background, cancels it first."""
        response_id = request.path_params["response_id"]
        self._store.get(response_id)
        task = self._tasks.get(response_id)
        if task is not None:
            await _cancel(task)
        self._store.delete(response_id)
        return json_response(DeletedResponseBody(id=response_id))

    def _start_in_background(self, answer: "_Answer") -> None:
        response_id = answer.begun.id
        task = asyncio.create_task(self._finish_in_background(answer))
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id))

    async def _finish_in_background(self, answer: "_Answer") -> None:
        try:
            response = await answer.whole()
        except asyncio.CancelledError:
            response = msgspec.structs.replace(answer.begun, status="cancelled")
        except Exception as error:
            response = _failed(answer.begun, describe_error(error)[1])
        if not self._store.put(response, answer.items):
            message = "the answer is too large for --response-store-bytes."
            self._store.put(_failed(answer.begun, error_body(500, message)), [])

    async def _events(self, answer: "_Answer") -> AsyncGenerator[ResponseEvent, None]:
        first = answer.writer.begin(answer.begun)
        async with aclosing(answer.outputs):
            async for _, output in answer.outputs:
                # Sent after the first output: an error before it can still have an HTTP status.
                for event in (*first, *answer.add_output(output)):
                    yield event
                first = []
        yield answer.writer.close(self._stored(answer.finished(), answer))

    def _stored(self, response: ResponseBody, answer: "_Answer") -> ResponseBody:
        """Stores the response if requested. `store` of the result says whether it was stored."""
        if response.store and not self._store.put(response, answer.items):
            return msgspec.structs.replace(response, store=False)
        return response

    def _begun(
        self, body: ResponsesRequest, sampling_params: SamplingParams, response_id: str
    ) -> ResponseBody:
        """The response before it has any text."""
        return ResponseBody(
            id=response_id,
            created_at=int(time.time()),
            status="queued" if body.background else "in_progress",
            background=bool(body.background),
            store=self._store.is_enabled and body.store is not False,
            previous_response_id=body.previous_response_id,
            instructions=body.instructions,
            # May be lower than requested, because the server may have a limit.
            max_output_tokens=sampling_params.max_tokens,
            metadata=body.metadata or {},
            model=self._engine.model_info.served_model_name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning=body.reasoning or {"effort": None, "summary": None},
            temperature=sampling_params.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_p=sampling_params.top_p,
            truncation=body.truncation or "disabled",
            user=body.user,
        )


class _Answer:
    """Converts the engine's outputs to a response, or to the events of a stream.

    Args:
        begun: The response before it has any text.
        items: The conversation that the response answers.
    """

    def __init__(
        self, chat: StartedChat, begun: ResponseBody, items: list[dict[str, object]]
    ) -> None:
        self.outputs = chat.outputs
        self.begun = begun
        self.items = items
        self.writer = ResponseWriter()
        make_counter = chat.make_thought_counter
        self._reader = AnswerReader(
            chat.tool_use,
            starts_thinking=chat.starts_thinking,
            thought_counter=None if make_counter is None else make_counter(),
        )
        self._usage = UsageCounter()
        self._finish_reason: str | None = None

    async def whole(self) -> ResponseBody:
        """Waits for all outputs, and returns the response."""
        async with aclosing(self.outputs):
            async for _, output in self.outputs:
                self.add_output(output)
        return self.finished()

    def add_output(self, output: RequestOutput) -> list[ResponseEvent]:
        """Adds an output to the response, and returns its events."""
        self._usage.set_prompt(0, output)
        self._usage.add_tokens(output)
        events: list[ResponseEvent] = []
        for completion in output.outputs:
            self._finish_reason = completion.finish_reason
            self._reader.add_tokens(completion.token_ids)
            part = self._reader.read(completion.text, is_last=completion.finished)
            events += self.writer.write(part)
            if completion.finished:
                events += self.writer.end(is_complete=completion.finish_reason == "stop")
        return events

    def finished(self) -> ResponseBody:
        """The response with its whole text."""
        is_complete = self._finish_reason == "stop"
        usage = self._usage.usage()
        return msgspec.structs.replace(
            self.begun,
            status="completed" if is_complete else "incomplete",
            incomplete_details=None if is_complete else IncompleteDetails("max_output_tokens"),
            output=self.writer.items,
            usage=ResponseUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=usage.prompt_tokens_details,
                output_tokens=usage.completion_tokens,
                output_tokens_details=ReasoningTokens(self._reader.num_thought_tokens),
                total_tokens=usage.total_tokens,
            ),
        )


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    # The task stores its response as cancelled.
    await asyncio.gather(task, return_exceptions=True)


def _new_id(request_id: str | None) -> str:
    """An id that cannot be guessed, because every client that knows it may read the response.

    The id becomes part of a path, so "/", "?" and the like in the client's name are replaced.
    """
    name = f"{_UNSAFE_IN_PATH.sub('_', request_id)}-" if request_id else ""
    return f"resp_{name}{uuid.uuid4().hex}"


def _failed(begun: ResponseBody, error_json: bytes) -> ResponseBody:
    detail = msgspec.json.decode(error_json, type=ErrorBody).error
    error = ResponseError(code=detail.code or detail.type, message=detail.message)
    return msgspec.structs.replace(begun, status="failed", error=error)
