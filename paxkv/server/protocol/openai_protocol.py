"""Request bodies of /v1/completions and /v1/chat/completions, and the prompts in them."""

import reprlib
from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from paxkv.contracts.engine_start import ModelInfo
from paxkv.errors import InvalidRequestError
from paxkv.server.engine_protocol import Prompt
from paxkv.server.protocol.error_response import UnknownModelError
from paxkv.server.protocol.ignored_parts import record_ignored_fields
from paxkv.server.protocol.json_body import convert_fields
from paxkv.server.protocol.request_names import MAX_REQUEST_ID_CHARS
from paxkv.server.protocol.unsupported_fields import (
    BEAM_SEARCH_FIELDS,
    CHAT_FIELDS,
    CHAT_IGNORED,
    COMPLETION_FIELDS,
    NO_BEAM_SEARCH_FIELDS,
    refuse_unsupported,
)

MAX_PROMPTS_PER_REQUEST = 256
# OpenAI's values; the chat template decides what they mean.
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
# Like `repr`, but shortens values: `repr` of a list of a million ids could not be interrupted.
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxlist = _SHORT_REPR.maxdict = 8
_SHORT_REPR.maxlevel = 4
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = 80
# Limit on the number of prompts times n.
MAX_CHOICES_PER_REQUEST = 1024


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage` adds a last chunk with the token counts.

    `continuous_usage_stats` adds the counts so far to every other chunk too.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share. null means the default, as in OpenAI's API."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = False
    length_penalty: float | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    request_id: Annotated[str, Meta(max_length=MAX_REQUEST_ID_CHARS)] | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    # The only string that the engine accepts is "auto".
    truncate_prompt_tokens: int | str | None = None
    truncation_side: Literal["left", "right"] | None = None
    stream_interval: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = False
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    response_format: dict[str, object] | None = None
    structured_outputs: dict[str, object] | None = None
    # OpenAI stores or counts these for its customers. They do not affect answers.
    user: str | None = None
    # vLLM 0.32 passes it to KV connectors and events. It does not affect answers there either.
    session_id: str | None = None
    metadata: dict[str, object] | None = None
    store: bool | None = None

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options.continuous_usage_stats)

    @property
    def num_choices(self) -> int:
        """Choices per prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_drawn(self) -> int:
        """Completions generated per prompt, from which the choices are selected."""
        return self.num_choices if self.best_of is None else self.best_of


_RequestT = TypeVar("_RequestT", bound=GenerationRequest)


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions. `prompt` has more forms than a struct can express."""

    prompt: object
    logprobs: int | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, object]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, object] | None = None
    documents: list[dict[str, object]] | None = None
    reasoning_effort: ReasoningEffort | None = None
    include_reasoning: bool | None = True
    tools: list[dict[str, object]] | None = None
    tool_choice: str | dict[str, object] | None = None
    parallel_tool_calls: bool | None = True
    return_prompt_text: bool | None = None


def parse_completion(fields: Mapping[str, object]) -> CompletionRequest:
    """Converts a JSON object to a request.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or is not supported.
    """
    refuse_unsupported(fields, COMPLETION_FIELDS)
    _check_stream_options(fields)
    _check_beam_search(fields)
    request = convert_fields(fields, CompletionRequest)
    _check_prompt_logprobs(request)
    return request


def parse_chat(fields: Mapping[str, object]) -> ChatCompletionRequest:
    """Same as `parse_completion`, for a chat."""
    refuse_unsupported(fields, CHAT_FIELDS)
    record_ignored_fields(fields, CHAT_IGNORED)
    _check_stream_options(fields)
    _check_beam_search(fields)
    request = convert_fields(fields, ChatCompletionRequest)
    _check_prompt_logprobs(request)
    check_generation_prompt(
        continue_final_message=request.continue_final_message,
        add_generation_prompt=request.add_generation_prompt,
    )
    return request


def with_usage(request: _RequestT) -> _RequestT:
    """The request; a stream always has token counts at its end, whatever `stream_options` say."""
    if not request.stream:
        return request
    options = request.stream_options or StreamOptions()
    options = msgspec.structs.replace(options, include_usage=True)
    return msgspec.structs.replace(request, stream_options=options)


def check_generation_prompt(
    *, continue_final_message: bool | None, add_generation_prompt: bool | None
) -> None:
    """Checks that a prompt does not both continue the last message and begin a new one.

    Raises:
        InvalidRequestError: The two fields ask for both.
    """
    if continue_final_message and add_generation_prompt is not False:
        raise InvalidRequestError(
            "continue_final_message continues the last message, and add_generation_prompt begins a "
            "new one; send add_generation_prompt false too.",
            param="continue_final_message",
        )


def check_model(requested: str | None, info: ModelInfo) -> None:
    """Checks the model of a request. It may be left out or be an empty name.

    Args:
        info: Describes the served model, which may have several names.

    Raises:
        UnknownModelError: The model is another one.
    """
    if requested and requested not in info.model_names:
        raise UnknownModelError(
            f"the model {requested[:128]!r} does not exist here; this server has "
            f"{', '.join(map(repr, info.model_names))}.",
            param="model",
        )


def check_num_choices(num_prompts: int, num_drawn: int, *, param: str = "n") -> None:
    """Checks the number of completions of a request.

    Args:
        param: The field with the number of completions per prompt.

    Raises:
        InvalidRequestError: The request asks for too many.
    """
    if num_prompts * num_drawn > MAX_CHOICES_PER_REQUEST:
        raise InvalidRequestError(
            f"{num_prompts} prompts with {param}={num_drawn} are {num_prompts * num_drawn} "
            f"completions; at most {MAX_CHOICES_PER_REQUEST} fit in one request.",
            param=param,
        )


def prompt_with_options(
    prompt: str | list[int], request: GenerationRequest, *, add_special_tokens: bool
) -> Prompt:
    """Combines a prompt with the request's options for it.

    Args:
        add_special_tokens: Used if the request does not have this field.
    """
    if request.add_special_tokens is not None:
        add_special_tokens = request.add_special_tokens
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    options: dict[str, object] = {key: prompt, "add_special_tokens": add_special_tokens}
    if request.truncate_prompt_tokens is not None:
        options["truncate_prompt_tokens"] = request.truncate_prompt_tokens
        options["truncation_side"] = request.truncation_side
    if request.cache_salt is not None:
        options["cache_salt"] = request.cache_salt
    return options


def completion_prompts(prompt: object) -> list[str | list[int]]:
    """The prompts of a request: a string, token ids, or a list of either.

    "ab" -> ["ab"]; ["a", "b"] -> ["a", "b"]; [1, 2] -> [[1, 2]]; [[1], [2, 3]] -> itself.

    Raises:
        InvalidRequestError: `prompt` is empty, is of another type, or contains too many prompts.
    """
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        prompts = [prompt]
    if len(prompts) > MAX_PROMPTS_PER_REQUEST:
        raise InvalidRequestError(
            f"prompt contains {len(prompts)} prompts; at most {MAX_PROMPTS_PER_REQUEST} fit in one "
            "request.",
            param="prompt",
        )
    for one_prompt in prompts:
        is_token_ids = isinstance(one_prompt, list) and set(map(type, one_prompt)) <= {int}
        if not (isinstance(one_prompt, str) or is_token_ids):
            raise InvalidRequestError(
                "prompt must be a string, a list of token ids, or a list of strings or of lists "
                f"of token ids; it contains {shorten(one_prompt)}.",
                param="prompt",
            )
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    return prompts


def _check_beam_search(fields: Mapping[str, object]) -> None:
    if fields.get("use_beam_search") is True:
        refuse_unsupported(fields, BEAM_SEARCH_FIELDS, when="with use_beam_search")
    else:
        refuse_unsupported(fields, NO_BEAM_SEARCH_FIELDS, when="without use_beam_search")


def _check_stream_options(fields: Mapping[str, object]) -> None:
    # Empty options ask for nothing.
    if fields.get("stream_options") and fields.get("stream") is not True:
        raise InvalidRequestError(
            "stream_options needs stream to be true; leave it out.", param="stream_options"
        )


def _check_prompt_logprobs(request: GenerationRequest) -> None:
    if request.stream and request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs cannot be streamed; leave out stream, or send echo with logprobs to "
            "/v1/completions.",
            param="prompt_logprobs",
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def shorten(value: object) -> str:
    """Formats a value for an error, in at most 80 characters."""
    text = _SHORT_REPR.repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
