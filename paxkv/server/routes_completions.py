"""POST /v1/completions: text after a prompt, for one prompt or several."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.contracts.request_output import CompletionOutput
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator, IndexedOutputs
from paxkv.server.json_body import read_json_object
from paxkv.server.openai_protocol import (
    CompletionRequest,
    check_model,
    completion_prompts,
    completion_sampling_params,
    parse_completion,
    prompt_with_options,
)
from paxkv.server.openai_responses import (
    CompletionBody,
    CompletionChoice,
    UsageCounter,
    completion_logprobs,
)
from paxkv.server.sse import EventStreamResponse


class CompletionRoutes:
    """The routes of text completion."""

    def __init__(self, engine: EngineClient, generator: Generator, *, max_body_bytes: int) -> None:
        self._engine = engine
        self._generator = generator
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        return [Route("/v1/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Completes every prompt of the body, in one piece or as a stream."""
        fields = await read_json_object(request, max_body_bytes=self._max_body_bytes)
        body = parse_completion(fields)
        check_model(body.model, self._engine.model_info.served_model_name)
        prompts = completion_prompts(body.prompt)
        outputs = self._generator.generate(
            [prompt_with_options(p, body, add_special_tokens=True) for p in prompts],
            completion_sampling_params(body),
            priority=body.priority or 0,
            stream=bool(body.stream),
        )
        completion_id = f"cmpl-{body.request_id or request.state.request_id}"
        if body.stream:
            return await EventStreamResponse.start(
                self._chunks(outputs, body, completion_id, len(prompts))
            )
        whole = await self._whole(outputs, body, completion_id)
        return Response(msgspec.json.encode(whole), media_type="application/json")

    async def _whole(
        self, outputs: IndexedOutputs, body: CompletionRequest, completion_id: str
    ) -> CompletionBody:
        usage = UsageCounter()
        choices: list[CompletionChoice] = []
        async with aclosing(outputs):
            async for prompt_idx, output in outputs:
                usage.add_prompt(output)
                usage.add_tokens(output)
                choices.append(_choice(prompt_idx, output.outputs[0], body, text_offset=0))
        return CompletionBody(
            id=completion_id,
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=sorted(choices, key=lambda choice: choice.index),
            usage=usage.usage(),
        )

    async def _chunks(
        self,
        outputs: IndexedOutputs,
        body: CompletionRequest,
        completion_id: str,
        num_prompts: int,
    ) -> AsyncGenerator[CompletionBody, None]:
        usage = UsageCounter()
        text_offsets = [0] * num_prompts
        chunk = CompletionBody(
            id=completion_id,
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=[],
            usage=None if body.include_usage else UNSET,
        )
        async with aclosing(outputs):
            async for prompt_idx, output in outputs:
                usage.add_tokens(output)
                if output.finished:
                    usage.add_prompt(output)
                completion = output.outputs[0]
                if not (completion.text or completion.logprobs or completion.finished):
                    continue  # half a character, or the start of what may be a stop string
                choice = _choice(prompt_idx, completion, body, text_offset=text_offsets[prompt_idx])
                if choice.logprobs is not None:
                    text_offsets[prompt_idx] += sum(map(len, choice.logprobs.tokens))
                yield msgspec.structs.replace(chunk, choices=[choice])
        if body.include_usage:
            yield msgspec.structs.replace(chunk, usage=usage.usage())


def _choice(
    prompt_idx: int, completion: CompletionOutput, body: CompletionRequest, *, text_offset: int
) -> CompletionChoice:
    return CompletionChoice(
        index=prompt_idx,
        text=completion.text,
        logprobs=completion_logprobs(completion, body.logprobs or 0, text_offset),
        finish_reason=completion.finish_reason,
        stop_reason=completion.stop_reason,
    )
