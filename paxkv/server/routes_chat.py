"""POST /v1/chat/completions: the next message of a conversation."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.contracts.request_output import CompletionOutput
from paxkv.server.chat_prompt import render_chat
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator, IndexedOutputs
from paxkv.server.json_body import read_json_object
from paxkv.server.openai_protocol import (
    ChatCompletionRequest,
    chat_sampling_params,
    check_model,
    parse_chat,
    prompt_with_options,
)
from paxkv.server.openai_responses import (
    ChatBody,
    ChatChoice,
    ChatDelta,
    ChatMessage,
    UsageCounter,
    chat_logprobs,
    has_news,
)
from paxkv.server.sse import EventStreamResponse


class ChatRoutes:
    """The routes of chat completion."""

    def __init__(self, engine: EngineClient, generator: Generator, *, max_body_bytes: int) -> None:
        self._engine = engine
        self._generator = generator
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answers the conversation of the body, in one piece or as a stream."""
        fields = await read_json_object(request, max_body_bytes=self._max_body_bytes)
        body = parse_chat(fields)
        check_model(body.model, self._engine.model_info.served_model_name)
        sampling_params = chat_sampling_params(body)
        text = await asyncio.to_thread(
            render_chat,
            self._engine,
            body.messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            template_kwargs=body.chat_template_kwargs,
        )
        outputs = self._generator.generate(
            # The template has written the special tokens, BOS included.
            [prompt_with_options(text, body, add_special_tokens=False)],
            sampling_params,
            priority=body.priority or 0,
            stream=bool(body.stream),
        )
        chat_id = f"chatcmpl-{body.request_id or request.state.request_id}"
        if body.stream:
            return await EventStreamResponse.start(self._chunks(outputs, body, chat_id))
        whole = await self._whole(outputs, body, chat_id)
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _whole(
        self, outputs: IndexedOutputs, body: ChatCompletionRequest, chat_id: str
    ) -> ChatBody:
        usage = UsageCounter()
        choices: list[ChatChoice] = []
        async with aclosing(outputs):
            async for _, output in outputs:
                usage.add_prompt(output)
                usage.add_tokens(output)
                choices += [
                    _choice(completion, body, message=ChatMessage(content=completion.text))
                    for completion in output.outputs
                ]
        return ChatBody(
            id=chat_id,
            object="chat.completion",
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=choices,
            usage=usage.usage(),
        )

    async def _chunks(
        self, outputs: IndexedOutputs, body: ChatCompletionRequest, chat_id: str
    ) -> AsyncGenerator[ChatBody, None]:
        usage = UsageCounter()
        chunk = ChatBody(
            id=chat_id,
            object="chat.completion.chunk",
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=[],
            usage=None if body.include_usage else UNSET,
        )
        roles = [
            ChatChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            for index in range(body.num_choices)
        ]
        async with aclosing(outputs):
            async for _, output in outputs:
                while roles:
                    yield msgspec.structs.replace(chunk, choices=[roles.pop(0)])
                usage.add_tokens(output)
                if output.finished:
                    usage.add_prompt(output)
                for completion in filter(has_news, output.outputs):
                    choice = _choice(completion, body, delta=ChatDelta(content=completion.text))
                    yield msgspec.structs.replace(chunk, choices=[choice])
        if body.include_usage:
            yield msgspec.structs.replace(chunk, usage=usage.usage())


def _choice(
    completion: CompletionOutput,
    body: ChatCompletionRequest,
    **content: ChatMessage | ChatDelta,
) -> ChatChoice:
    num_top = (body.top_logprobs or 0) if body.logprobs else None
    return ChatChoice(
        index=completion.index,
        logprobs=chat_logprobs(completion, num_top),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
        **content,
    )
