"""POST /v1/chat/completions: the next message of a conversation."""

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import msgspec
from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from paxkv.config.sampling_params import BeamSearchParams, SamplingParams, check_num_logprobs
from paxkv.config.server_config import ServerConfig
from paxkv.server.engine_protocol import EngineClient, Tokenizer
from paxkv.server.generation import Generator, IndexedOutputs
from paxkv.server.loop_turn import LoopTurn
from paxkv.server.protocol.chat.chat_choices import ChatChoices
from paxkv.server.protocol.chat.chat_messages import content_text
from paxkv.server.protocol.chat.chat_prompt import check_template_allowed, render_chat
from paxkv.server.protocol.chat.chat_responses import ChatBody, ChatChoice
from paxkv.server.protocol.field_names import CHAT_NAMES, FieldNames
from paxkv.server.protocol.ignored_parts import record_ignored_keywords
from paxkv.server.protocol.json_body import read_body
from paxkv.server.protocol.openai_protocol import (
    ChatCompletionRequest,
    check_model,
    parse_chat,
    prompt_with_options,
    with_usage,
)
from paxkv.server.protocol.openai_responses import UsageCounter, prompt_logprobs
from paxkv.server.protocol.sampling_fields import chat_sampling_params
from paxkv.server.protocol.sse import EventStreamResponse
from paxkv.server.protocol.structured_fields import with_server_settings
from paxkv.server.protocol.tool_choice import ToolUse, tool_use
from paxkv.server.routes.json_response import json_response
from paxkv.server.stream_interval import in_intervals
from paxkv.text.reasoning_parser import REASONING_PARSERS, thought_token_ids
from paxkv.text.thought_counter import ThoughtCounter


class ChatRoutes:
    """The routes of chat completion."""

    def __init__(self, engine: EngineClient, generator: Generator, config: ServerConfig) -> None:
        self._engine = engine
        self._generator = generator
        self._config = config

    def routes(self) -> list[Route]:
        return [Route("/v1/chat/completions", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        """Answers the conversation in the body, as one response or as a stream."""
        body = await read_body(request, parse_chat, max_body_bytes=self._config.max_body_bytes)
        if self._config.enable_force_include_usage:
            body = with_usage(body)
        check_model(body.model, self._engine.model_info)
        chat = await start_chat(body, self._engine, self._generator, self._config)
        choices = ChatChoices(
            body,
            chat.tool_use,
            starts_thinking=chat.starts_thinking,
            token_bytes=_token_bytes(self._engine.tokenizer),
            make_thought_counter=chat.make_thought_counter,
            echoed=_echoed(body),
        )
        chat_id = f"chatcmpl-{body.request_id or request.state.request_id}"
        if body.stream:
            return await EventStreamResponse.start(self._chunks(chat, choices, body, chat_id))
        whole = await self._whole(chat, choices, body, chat_id)
        return json_response(whole)

    def _usage_counter(self, builder: ChatChoices) -> UsageCounter:
        # Without a reasoning parser thoughts are not counted, so the usage must not report 0.
        counts_thoughts = self._config.reasoning_parser is not None
        return UsageCounter(builder.num_thought_tokens if counts_thoughts else None)

    async def _whole(
        self,
        chat: "StartedChat",
        builder: ChatChoices,
        body: ChatCompletionRequest,
        chat_id: str,
    ) -> ChatBody:
        usage = self._usage_counter(builder)
        choices: list[ChatChoice] = []
        shown: dict[str, object] = {}
        turn = LoopTurn()
        if body.return_prompt_text:
            shown["prompt_text"] = chat.prompt_text
        async with aclosing(chat.outputs):
            async for prompt_idx, output in chat.outputs:
                usage.set_prompt(prompt_idx, output)
                usage.add_tokens(output)
                for completion in output.outputs:
                    choices.append(builder.whole(completion))
                    await turn.end_if_long()
                if body.prompt_logprobs is not None and output.prompt_logprobs is not None:
                    shown["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
                if body.return_token_ids:
                    shown["prompt_token_ids"] = output.prompt_token_ids
        return ChatBody(
            id=chat_id,
            object="chat.completion",
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=choices,
            usage=usage.usage(),
            **shown,
        )

    async def _chunks(
        self,
        chat: "StartedChat",
        builder: ChatChoices,
        body: ChatCompletionRequest,
        chat_id: str,
    ) -> AsyncGenerator[ChatBody, None]:
        usage = self._usage_counter(builder)
        chunk = ChatBody(
            id=chat_id,
            object="chat.completion.chunk",
            created=int(time.time()),
            model=self._engine.model_info.served_model_name,
            choices=[],
            usage=None if body.include_usage else UNSET,
        )
        firsts = builder.first_chunks()
        async with aclosing(chat.outputs):
            async for prompt_idx, output in chat.outputs:
                usage.set_prompt(prompt_idx, output)
                while firsts:
                    so_far = {"usage": usage.usage()} if body.has_continuous_usage else {}
                    if body.return_token_ids:
                        so_far["prompt_token_ids"] = output.prompt_token_ids
                    if body.return_prompt_text:
                        so_far["prompt_text"] = chat.prompt_text
                    yield msgspec.structs.replace(chunk, choices=[firsts.pop(0)], **so_far)
                for completion in output.outputs:
                    usage.completion_tokens += len(completion.token_ids)
                    choice = builder.chunk(completion)
                    if choice is not None:
                        so_far = {"usage": usage.usage()} if body.has_continuous_usage else {}
                        yield msgspec.structs.replace(chunk, choices=[choice], **so_far)
        if body.include_usage:
            yield msgspec.structs.replace(chunk, usage=usage.usage())


def _token_bytes(tokenizer: Tokenizer | None) -> Callable[[int], bytes]:
    # Without a tokenizer the engine rejects the prompt, so there are no tokens.
    return (lambda _token_id: b"") if tokenizer is None else tokenizer.token_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartedChat:
    """A chat that runs in the engine as soon as its first output is awaited.

    Args:
        prompt_text: The prompt that the chat template rendered.
        sampling_params: Includes the defaults of fields that the body leaves out.
        starts_thinking: Whether answers begin with thoughts; None if thoughts are not separated
            from answers.
        make_thought_counter: Makes a counter for one answer; None if thoughts are not counted.
    """

    outputs: IndexedOutputs
    prompt_text: str
    sampling_params: SamplingParams | BeamSearchParams
    tool_use: ToolUse
    starts_thinking: bool | None
    make_thought_counter: Callable[[], ThoughtCounter] | None


async def start_chat(
    body: ChatCompletionRequest,
    engine: EngineClient,
    generator: Generator,
    config: ServerConfig,
    names: FieldNames = CHAT_NAMES,
) -> StartedChat:
    """Checks a chat and prepares its run in the engine.

    Args:
        names: The client's names for the fields of a chat, for errors.

    Raises:
        InvalidRequestError: The request is not valid or not supported.
    """
    with names.in_errors():
        return await _start_chat(body, engine, generator, config, names)


async def _start_chat(
    body: ChatCompletionRequest,
    engine: EngineClient,
    generator: Generator,
    config: ServerConfig,
    names: FieldNames,
) -> StartedChat:
    check_template_allowed(body.chat_template, config)
    info = engine.model_info
    # Checked here because later checks would call the field `logprobs` in their errors.
    check_num_logprobs(
        "top_logprobs",
        body.top_logprobs,
        max_logprobs=info.max_logprobs,
        vocab_size=info.vocab_size,
    )
    tools = tool_use(body, config, names)
    sampling_params = with_server_settings(
        chat_sampling_params(body, info.sampling_defaults, tools, names),
        config.structured_outputs_config,
    )
    template_kwargs = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        template_kwargs.setdefault("reasoning_effort", body.reasoning_effort)
    rendered = await asyncio.to_thread(
        render_chat,
        engine,
        body.messages,
        add_generation_prompt=body.add_generation_prompt is not False,
        template_kwargs=config.default_chat_template_kwargs.with_request(template_kwargs),
        tools=tools.tools,
        documents=body.documents,
        continue_final_message=bool(body.continue_final_message),
        chat_template=body.chat_template,
        counts_leading_chars=info.saves_states,
    )
    text = rendered.text
    is_bound = (
        not isinstance(sampling_params, BeamSearchParams)
        and sampling_params.structured_outputs is not None
    )
    starts_thinking = _starts_thinking(text, engine, config, is_bound=is_bound)
    if is_bound:
        sampling_params = _with_thoughts(sampling_params, starts_thinking)
    # The template has already written the special tokens, including BOS.
    prompt = prompt_with_options(text, body, add_special_tokens=False)
    if rendered.num_leading_chars:
        prompt = {**prompt, "num_leading_chars": rendered.num_leading_chars}
    outputs = generator.generate(
        [prompt],
        sampling_params,
        priority=body.priority or 0,
        stream=bool(body.stream),
    )
    if body.stream:
        outputs = in_intervals(outputs, body.stream_interval or config.stream_interval)
    if is_bound:
        outputs = record_ignored_keywords(outputs)
    outputs = names.in_errors_of(outputs)
    return StartedChat(
        outputs=outputs,
        prompt_text=text,
        sampling_params=sampling_params,
        tool_use=tools,
        starts_thinking=starts_thinking,
        make_thought_counter=_thought_counters(engine, sampling_params, starts_thinking),
    )


def _thought_counters(
    engine: EngineClient,
    params: SamplingParams | BeamSearchParams,
    starts_thinking: bool | None,
) -> Callable[[], ThoughtCounter] | None:
    if starts_thinking is None or engine.tokenizer is None:
        return None
    if isinstance(params, BeamSearchParams):
        skips_special_tokens = not params.include_stop_str_in_output
    else:
        skips_special_tokens = params.skip_special_tokens
    return functools.partial(
        ThoughtCounter, engine.tokenizer, skip_special_tokens=skips_special_tokens
    )


def _starts_thinking(
    prompt: str, engine: EngineClient, config: ServerConfig, *, is_bound: bool
) -> bool | None:
    """Whether an answer begins with thoughts; None if thoughts are not separated from it."""
    if config.reasoning_parser is None:
        return None
    # A grammar applies after the token that ends the thoughts. Without such a token, it applies to
    # the whole answer.
    is_whole = config.structured_outputs_config.enable_in_reasoning
    if is_bound and (is_whole or not _has_thought_tokens(engine)):
        return None
    # A tag at the end of the prompt overrides the parser's default.
    end = prompt.rstrip()
    if end.endswith("</think>"):
        return None
    return end.endswith("<think>") or REASONING_PARSERS[config.reasoning_parser]


def _has_thought_tokens(engine: EngineClient) -> bool:
    tokenizer = engine.tokenizer
    if tokenizer is None:
        return False
    return thought_token_ids(tokenizer, engine.model_info.vocab_size) is not None


def _with_thoughts(params: SamplingParams, starts_thinking: bool | None) -> SamplingParams:
    """The parameters, with thoughts allowed before the grammar applies."""
    thoughts = {None: "none", False: "maybe", True: "begun"}[starts_thinking]
    form = dataclasses.replace(params.structured_outputs, thoughts=thoughts)
    return dataclasses.replace(params, structured_outputs=form)


def _echoed(body: ChatCompletionRequest) -> str:
    """With `echo`, the text of the last message if it is the assistant's; otherwise ""."""
    last = body.messages[-1]
    if not body.echo or last.get("role") != "assistant":
        return ""
    return content_text(last.get("content") or "")
