"""POST /v1/completions: continues one prompt or several."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams
from paxkv.config.server_config import ServerConfig
from paxkv.server.engine_protocol import EngineClient
from paxkv.server.generation import Generator, IndexedOutputs
from paxkv.server.loop_turn import LoopTurn
from paxkv.server.protocol.completion_choices import CompletionChoices
from paxkv.server.protocol.ignored_parts import record_ignored_keywords
from paxkv.server.protocol.json_body import read_body
from paxkv.server.protocol.openai_protocol import (
    CompletionRequest,
    check_model,
    check_num_choices,
    completion_prompts,
    parse_completion,
    prompt_with_options,
    with_usage,
)
from paxkv.server.protocol.openai_responses import (
    CompletionBody,
    CompletionChoice,
    UsageCounter,
)
from paxkv.server.protocol.sampling_fields import completion_sampling_params
from paxkv.server.protocol.sse import EventStreamResponse
from paxkv.server.protocol.structured_fields import with_server_settings
from paxkv.server.routes.json_response import json_response
from paxkv.server.stream_interval import in_intervals


class CompletionRoutes:
    """The routes of text completion."""

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig) -> None:
        self._engine = engine
        self._generator = generator
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("/v1/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Completes every prompt in the body, as one response or as a stream."""
        body, prompts, sampling_params = await read_body(
            request, self._read, max_body_bytes=self._config.max_body_bytes
        )
        builder = CompletionChoices(body, prompts, self._engine.tokenizer)
        outputs = self._generator.generate(
            [prompt_with_options(p, body, add_special_tokens=True) for p in prompts],
            sampling_params,
            priority=body.priority or 0,
            stream=bool(body.stream),
        )
        if body.stream:
            outputs = in_intervals(outputs, body.stream_interval or self._config.stream_interval)
        outputs = record_ignored_keywords(outputs)
        completion_id = f"cmpl-{body.request_id or request.state.request_id}"
        if body.stream:
            chunks = self._chunks(outputs, builder, body, completion_id)
            return await EventStreamResponse.start(chunks)
        whole = await self._whole(outputs, builder, completion_id)
        return json_response(whole)

    def _read(
        self, fields: dict[str, object]
    ) -> tuple[CompletionRequest, list[str | list[int]], SamplingParams | BeamSearchParams]:
        body = parse_completion(fields)
        if self._config.enable_force_include_usage:
            body = with_usage(body)
        check_model(body.model, self._engine.model_info)
        prompts = completion_prompts(body.prompt)
        sampling_params = with_server_settings(
            completion_sampling_params(body, self._engine.model_info.sampling_defaults),
            self._config.structured_outputs_config,
        )
        param = "n" if body.num_drawn == body.num_choices else "best_of"
        check_num_choices(len(prompts), body.num_drawn, param=param)
        return body, prompts, sampling_params

    async def _whole(
        self, outputs: IndexedOutputs, builder: CompletionChoices, completion_id: str
    ) -> CompletionBody:
        usage = UsageCounter()
        choices: list[CompletionChoice] = []
        turn = LoopTurn()
        async with aclosing(outputs):
            async for prompt_idx, output in outputs:
                usage.set_prompt(prompt_idx, output)
                usage.completion_tokens += sum(map(builder.num_tokens, output.outputs))
                for completion in builder.kept(output):
                    choice = builder.make_choice(prompt_idx, output, completion)
                    if choice is not None:
                        choices.append(choice)
                    await turn.end_if_long()
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
        builder: CompletionChoices,
        body: CompletionRequest,
        completion_id: str,
    ) -> AsyncGenerator[CompletionBody, None]:
        usage = UsageCounter()
        chunk = CompletionBody(
            id=completion_id,
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=[],
            usage=None if body.include_usage else UNSET,
        )
        async with aclosing(outputs):
            async for prompt_idx, output in outputs:
                usage.set_prompt(prompt_idx, output)
                for completion in output.outputs:
                    usage.completion_tokens += builder.num_tokens(completion)
                    choice = builder.make_choice(prompt_idx, output, completion)
                    if choice is None:
                        continue
                    so_far = {"usage": usage.usage()} if body.has_continuous_usage else {}
                    yield msgspec.structs.replace(chunk, choices=[choice], **so_far)
        if body.include_usage:
            yield msgspec.structs.replace(chunk, usage=usage.usage())
