"""Bodies of /v1/completions and /v1/chat/completions: what is read, and what it turns into."""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.sampling_params import MAX_BEAM_WIDTH, MAX_LOGPROBS, BeamSearchParams, SamplingParams
from paxkv.server.engine_protocol import Prompt
from paxkv.server.error_response import UnknownModelError
from paxkv.server.json_body import convert_fields
from paxkv.server.middleware import MAX_REQUEST_ID_CHARS
from paxkv.server.unsupported_fields import (
    BEAM_SEARCH_FIELDS,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    MESSAGE_FIELDS,
    NO_BEAM_SEARCH_FIELDS,
    STREAM_OPTIONS_FIELDS,
    refuse_unsupported,
)

MAX_PROMPTS_PER_REQUEST = 256
# Prompts times n.
MAX_CHOICES_PER_REQUEST = 1024
# The length of a completion when the request names none, as OpenAI has it. A chat goes on to
# max_model_len instead.
DEFAULT_COMPLETION_TOKENS = 16
_ROLES = ("system", "developer", "user", "assistant")


class StreamOptions(msgspec.Struct, frozen=True):
    """`include_usage` adds a last chunk with the token counts."""

    include_usage: bool | None = False


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that both endpoints share; null means the default, as in OpenAI's clients."""

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

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return 1 if self.n is None else self.n


class CompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/completions. `prompt` has more forms than a struct can name."""

    prompt: object
    logprobs: int | None = None


class ChatCompletionRequest(GenerationRequest, frozen=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: list[dict[str, object]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, object] | None = None


def parse_completion(fields: Mapping[str, object]) -> CompletionRequest:
    """The request that a JSON object describes.

    Raises:
        InvalidRequestError: A field is missing, has the wrong type, or cannot be honoured.
    """
    refuse_unsupported(fields, COMPLETION_FIELDS)
    _check_stream_options(fields)
    _check_beam_search(fields)
    return convert_fields(fields, CompletionRequest)


def parse_chat(fields: Mapping[str, object]) -> ChatCompletionRequest:
    """Same as `parse_completion`, for a chat."""
    refuse_unsupported(fields, CHAT_FIELDS)
    _check_stream_options(fields)
    _check_beam_search(fields)
    return convert_fields(fields, ChatCompletionRequest)


def check_model(requested: str | None, served_model_name: str) -> None:
    """A request may leave the model out; the one that it names must be the one served.

    Raises:
        UnknownModelError: It is not.
    """
    if requested not in (None, served_model_name):
        raise UnknownModelError(
            f"the model {requested!r} does not exist here; this server has {served_model_name!r}.",
            param="model",
        )


def check_num_choices(num_prompts: int, num_choices: int) -> None:
    """A request may ask for so many choices in all.

    Raises:
        InvalidRequestError: It asks for more.
    """
    if num_prompts * num_choices > MAX_CHOICES_PER_REQUEST:
        raise InvalidRequestError(
            f"{num_prompts} prompts with n={num_choices} are {num_prompts * num_choices} choices; "
            f"at most {MAX_CHOICES_PER_REQUEST} fit in one request.",
            param="n",
        )


def completion_sampling_params(request: CompletionRequest) -> SamplingParams | BeamSearchParams:
    """How to find a completion.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    max_tokens = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    if request.use_beam_search:
        return _beam_search_params(request, max_tokens, "logprobs", request.logprobs)
    return _sampling_params(request, max_tokens=max_tokens, logprobs=request.logprobs)


def chat_sampling_params(request: ChatCompletionRequest) -> SamplingParams | BeamSearchParams:
    """How to find an answer; without a limit it may fill what is left of max_model_len.

    Raises:
        InvalidRequestError: A value is out of range, or `top_logprobs` comes without `logprobs`.
    """
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs to be true; send it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    # Under these names SamplingParams does not know them, so its message would name another field.
    _check_range("top_logprobs", request.top_logprobs, low=0, high=MAX_LOGPROBS)
    _check_range("max_completion_tokens", request.max_completion_tokens, low=1, high=2**31 - 1)
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    max_tokens = request.max_completion_tokens
    max_tokens = request.max_tokens if max_tokens is None else max_tokens
    if request.use_beam_search:
        return _beam_search_params(request, max_tokens, "top_logprobs", logprobs)
    return _sampling_params(request, max_tokens=max_tokens, logprobs=logprobs)


def prompt_with_options(
    prompt: str | list[int], request: GenerationRequest, *, add_special_tokens: bool
) -> Prompt:
    """A prompt as the engine takes it, with the request's options for it.

    Args:
        add_special_tokens: Unless the request says otherwise.
    """
    if request.add_special_tokens is not None:
        add_special_tokens = request.add_special_tokens
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    options: dict[str, object] = {key: prompt, "add_special_tokens": add_special_tokens}
    if request.cache_salt is not None:
        options["cache_salt"] = request.cache_salt
    return options


def completion_prompts(prompt: object) -> list[str | list[int]]:
    """The prompts of a request: a string, token ids, or a list of either.

    "ab" -> ["ab"]; ["a", "b"] -> ["a", "b"]; [1, 2] -> [[1, 2]]; [[1], [2, 3]] -> itself.

    Raises:
        InvalidRequestError: `prompt` is empty, is of another type, or holds too many prompts.
    """
    prompts = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(prompt, list) and prompt and _is_int(prompt[0]):
        prompts = [prompt]
    if len(prompts) > MAX_PROMPTS_PER_REQUEST:
        raise InvalidRequestError(
            f"prompt holds {len(prompts)} prompts; at most {MAX_PROMPTS_PER_REQUEST} fit in one "
            "request.",
            param="prompt",
        )
    for one_prompt in prompts:
        is_token_ids = isinstance(one_prompt, list) and all(map(_is_int, one_prompt))
        if not (isinstance(one_prompt, str) or is_token_ids):
            raise InvalidRequestError(
                "prompt must be a string, a list of token ids, or a list of strings or of lists "
                f"of token ids; it holds {_shorten(one_prompt)}.",
                param="prompt",
            )
    if not prompts or not all(prompts):
        raise InvalidRequestError("prompt must not be empty.", param="prompt")
    return prompts


def chat_messages(messages: list[dict[str, object]]) -> list[dict[str, object]]:
    """Messages as a chat template takes them: every content is one string.

    Raises:
        InvalidRequestError: There is no message, or one has a role or content that cannot be used.
    """
    if not messages:
        raise InvalidRequestError("messages must not be empty.", param="messages")
    return [_chat_message(i, message) for i, message in enumerate(messages)]


def _chat_message(i: int, message: dict[str, object]) -> dict[str, object]:
    path = f"messages[{i}]"
    refuse_unsupported(message, MESSAGE_FIELDS, path=f"{path}.")
    role = message.get("role")
    if role not in _ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(_ROLES)}, got {_shorten(role)}.",
            param=f"{path}.role",
        )
    text = _content_text(f"{path}.content", message.get("content"))
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError(
            f"{path}.name must be a string, got {_shorten(name)}.", param=f"{path}.name"
        )
    return {"role": role, "content": text} | ({} if name is None else {"name": name})


def _content_text(path: str, content: object) -> str:
    """[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] -> "a\\nb", as vLLM does."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f"{path} must be a string or a list of text parts, got {_shorten(content)}.",
            param=path,
        )
    texts = []
    for k, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise InvalidRequestError(
                f'{path}[{k}] must be {{"type": "text", "text": "..."}}, got {_shorten(part)}; '
                "this server reads text only.",
                param=f"{path}[{k}]",
            )
        texts.append(part["text"])
    return "\n".join(texts)


def _sampling_params(
    request: GenerationRequest, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    _check_best_of(request)
    given = {
        name: getattr(request, name)
        for name in (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "stop",
            "stop_token_ids",
            "ignore_eos",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "include_stop_str_in_output",
        )
        if getattr(request, name) is not None
    }
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **given)


def _beam_search_params(
    request: GenerationRequest, max_tokens: int | None, logprobs_name: str, logprobs: int | None
) -> BeamSearchParams:
    """The beam width is `n`, as in vLLM; the temperature is 0 unless told otherwise."""
    _check_best_of(request)
    if max_tokens is None:
        raise InvalidRequestError(
            "use_beam_search needs max_tokens: a search goes on to that length.",
            param="max_tokens",
        )
    _check_range("n", request.n, low=1, high=MAX_BEAM_WIDTH)
    # Those are the candidates that a search sees.
    _check_range(logprobs_name, logprobs, low=0, high=2 * request.num_choices)
    given = {
        name: getattr(request, name)
        for name in ("temperature", "ignore_eos", "length_penalty", "include_stop_str_in_output")
        if getattr(request, name) is not None
    }
    return BeamSearchParams(beam_width=request.num_choices, max_tokens=max_tokens, **given)


def _check_best_of(request: GenerationRequest) -> None:
    if request.best_of not in (None, request.num_choices):
        raise UnsupportedFeatureError(
            f"best_of={request.best_of} with n={request.num_choices} is not supported: every "
            "completion that is found is returned. Leave best_of out, or send it equal to n.",
            param="best_of",
        )


def _check_beam_search(fields: Mapping[str, object]) -> None:
    if fields.get("use_beam_search") is True:
        refuse_unsupported(fields, BEAM_SEARCH_FIELDS, when="with use_beam_search")
    else:
        refuse_unsupported(fields, NO_BEAM_SEARCH_FIELDS, when="without use_beam_search")


def _check_stream_options(fields: Mapping[str, object]) -> None:
    options = fields.get("stream_options")
    if options is None:
        return
    if fields.get("stream") is not True:
        raise InvalidRequestError(
            "stream_options needs stream to be true; leave it out.", param="stream_options"
        )
    if isinstance(options, dict):
        refuse_unsupported(options, STREAM_OPTIONS_FIELDS, path="stream_options.")


def _check_range(name: str, value: int | None, *, low: int, high: int) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}.", param=name)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _shorten(value: object) -> str:
    """A value as an error message shows it: never the whole of a long prompt."""
    try:
        text = repr(value[:8] if isinstance(value, (list, str)) else value)
    except RecursionError:
        # Nested just deeply enough for the JSON decoder, whose stack was less deep than this one.
        return "something nested too deeply"
    return text if len(text) <= 80 else text[:77] + "..."
