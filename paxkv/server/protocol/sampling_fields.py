"""Converts the fields of a body to SamplingParams or BeamSearchParams."""

from collections.abc import Mapping

from paxkv.config.sampling_defaults import SamplingDefaults
from paxkv.config.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_LOGIT_BIASES,
    MAX_N,
    MIN_TEMPERATURE,
    BeamSearchParams,
    SamplingParams,
)
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.server.protocol.field_names import CHAT_NAMES, FieldNames
from paxkv.server.protocol.openai_protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
)
from paxkv.server.protocol.structured_fields import structured_outputs_params
from paxkv.server.protocol.tool_choice import ToolUse

# The default length of a completion, as in OpenAI's API, unless the model's own default is smaller.
# The default length of a chat's answer is the model's, or what max_model_len allows.
DEFAULT_COMPLETION_TOKENS = 16
# OpenAI's limit. As in vLLM, larger biases are clipped to it.
MAX_LOGIT_BIAS = 100.0
MAX_MAX_TOKENS = 2**31 - 1
# Fields that have the same name and meaning in SamplingParams.
_SAME_NAMES = (
    "n",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "bad_words",
    "allowed_token_ids",
    "min_tokens",
    "prompt_logprobs",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
)


def completion_sampling_params(
    request: CompletionRequest, defaults: SamplingDefaults
) -> SamplingParams | BeamSearchParams:
    """The sampling parameters of a completion.

    Args:
        defaults: Values of fields that the request leaves out or sends as null.

    Raises:
        InvalidRequestError: A value is out of range.
    """
    if request.use_beam_search:
        max_tokens = _completion_max_tokens(request, defaults)
        return _beam_search_params(request, max_tokens, "logprobs", request.logprobs)
    return SamplingParams(**completion_keywords(request, defaults))


def completion_keywords(
    request: CompletionRequest, defaults: SamplingDefaults
) -> dict[str, object]:
    """The arguments of SamplingParams for a completion."""
    max_tokens = _completion_max_tokens(request, defaults)
    _check_best_of(request, defaults)
    keywords = _shared_keywords(request, defaults)
    # Scoring a prompt also samples a token, although the client asked for none.
    keywords["max_tokens"] = 1 if echoes_prompt_only(request) else max_tokens
    keywords["logprobs"] = request.logprobs
    if request.num_drawn != request.num_choices:
        keywords["n"] = request.num_drawn
        # The completions are ranked by log-probability.
        keywords["logprobs"] = request.logprobs or 0
    if request.echo and request.logprobs is not None:
        keywords.setdefault("prompt_logprobs", request.logprobs)
    return keywords


def echoes_prompt_only(request: CompletionRequest) -> bool:
    """Whether the answer is only the prompt."""
    return bool(request.echo) and request.max_tokens == 0


def _completion_max_tokens(request: CompletionRequest, defaults: SamplingDefaults) -> int:
    if request.max_tokens is not None:
        if not echoes_prompt_only(request):
            check_range("max_tokens", request.max_tokens, low=1, high=MAX_MAX_TOKENS)
        return _limited(request.max_tokens, defaults)
    default = defaults.generation_config.max_new_tokens
    return min(DEFAULT_COMPLETION_TOKENS, default or DEFAULT_COMPLETION_TOKENS)


def _limited(max_tokens: int, defaults: SamplingDefaults) -> int:
    """Applies the server's limit. Callers check the range first, so that no error is hidden."""
    limit = defaults.max_tokens_limit
    return max_tokens if limit is None else min(max_tokens, limit)


def chat_sampling_params(
    request: ChatCompletionRequest,
    defaults: SamplingDefaults,
    tools: ToolUse | None = None,
    names: FieldNames = CHAT_NAMES,
) -> SamplingParams | BeamSearchParams:
    """The sampling parameters of a chat's answer.

    Without `max_tokens` and `max_completion_tokens`, the length is left open. `InputProcessor`,
    which knows the length of the prompt, sets it to the default or to the rest of max_model_len.

    Args:
        defaults: As in `completion_sampling_params`.
        tools: How the request uses tools. If it requires calls, they determine the answer's form.
        names: The client's names for the fields.

    Raises:
        InvalidRequestError: A value is out of range, or `top_logprobs` is without `logprobs`.
    """
    keywords = chat_keywords(request, defaults, tools, names)
    if request.use_beam_search:
        max_tokens = keywords["max_tokens"]
        # Without a default of the model, a search would run to max_model_len.
        if max_tokens is None and defaults.generation_config.max_new_tokens is None:
            raise InvalidRequestError(
                "use_beam_search needs max_tokens: a search runs to that length.",
                param="max_tokens",
            )
        return _beam_search_params(request, max_tokens, "top_logprobs", keywords["logprobs"])
    return SamplingParams(**keywords)


def chat_keywords(
    request: ChatCompletionRequest,
    defaults: SamplingDefaults,
    tools: ToolUse | None = None,
    names: FieldNames = CHAT_NAMES,
) -> dict[str, object]:
    """The arguments of SamplingParams for a chat."""
    # Some clients fill in every field, and send 0, vLLM's default.
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequestError(
            "top_logprobs needs logprobs to be true; send it, or leave top_logprobs out.",
            param="top_logprobs",
        )
    _check_best_of_is_n(request)
    # SamplingParams has other names for these fields, which its errors would show.
    check_range("top_logprobs", request.top_logprobs, low=-1, high=2**31 - 1)
    name = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(request, name)
    check_range(name, max_tokens, low=1, high=MAX_MAX_TOKENS)
    keywords = _shared_keywords(request, defaults, names)
    keywords["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    keywords["max_tokens"] = None if max_tokens is None else _limited(max_tokens, defaults)
    if tools is not None and tools.schema is not None:
        # `response_format` may stay: it is about content, and an answer of only calls has none.
        if request.structured_outputs is not None:
            raise InvalidRequestError(
                "tool_choice already determines the form of the answer; leave structured_outputs "
                "out.",
                param="tool_choice",
            )
        keywords["structured_outputs"] = tools.form()
    return keywords


def _shared_keywords(
    request: GenerationRequest, defaults: SamplingDefaults, names: FieldNames = CHAT_NAMES
) -> dict[str, object]:
    keywords: dict[str, object] = {**defaults.generation_config.sampling_keywords()}
    for name in _SAME_NAMES:
        if getattr(request, name) is not None:
            keywords[name] = getattr(request, name)
    if request.logit_bias is not None:
        keywords["logit_bias"] = _logit_bias(request.logit_bias)
    structured = structured_outputs_params(
        request.response_format, request.structured_outputs, names
    )
    if structured is not None:
        keywords["structured_outputs"] = structured
    return keywords


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    """{"17": 250.0} -> {17: 100.0}. Keys in JSON are always strings."""
    # Checked before the loop, because a body may contain hundreds of thousands of biases.
    if len(biases) > MAX_LOGIT_BIASES:
        raise InvalidRequestError(
            f"logit_bias has {len(biases)} token ids; at most {MAX_LOGIT_BIASES} fit in one "
            "request.",
            param="logit_bias",
        )
    found = {}
    for key, bias in biases.items():
        if not key.isascii() or not key.isdecimal() or len(key) > 10:
            raise InvalidRequestError(
                f"logit_bias maps token ids to numbers, got the key {key[:40]!r}.",
                param="logit_bias",
            )
        found[int(key)] = min(max(bias, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS)
    return found


def _beam_search_params(
    request: GenerationRequest, max_tokens: int | None, logprobs_name: str, logprobs: int | None
) -> BeamSearchParams:
    """The beam width is `n`, as in vLLM. The default temperature is 0."""
    _check_best_of_is_n(request)
    check_range("n", request.n, low=1, high=MAX_BEAM_WIDTH)
    # A search sees 2 * n candidates.
    check_range(logprobs_name, logprobs, low=0, high=2 * request.num_choices)
    given = {
        name: getattr(request, name)
        for name in ("temperature", "ignore_eos", "length_penalty", "include_stop_str_in_output")
        if getattr(request, name) is not None
    }
    return BeamSearchParams(beam_width=request.num_choices, max_tokens=max_tokens, **given)


def _check_best_of(request: CompletionRequest, defaults: SamplingDefaults) -> None:
    """Checks `best_of`: as in OpenAI's API, only the `n` most likely completions are returned."""
    if request.best_of in (None, request.num_choices):
        return
    # The `n` of SamplingParams is `best_of`, so its errors would name another field.
    check_range("n", request.n, low=1, high=MAX_N)
    check_range("best_of", request.best_of, low=request.num_choices, high=MAX_N)
    if request.stream:
        raise InvalidRequestError(
            f"best_of={request.best_of} with n={request.num_choices} cannot be streamed: the best "
            "completions are known only when all have ended. Leave stream out, or send best_of "
            "equal to n.",
            param="best_of",
        )
    temperature = request.temperature
    if temperature is None:
        temperature = defaults.generation_config.temperature
    if temperature is not None and temperature < MIN_TEMPERATURE:
        raise InvalidRequestError(
            f"best_of={request.best_of} greedy completions would all be the same, got "
            f"temperature={temperature}. Send a temperature, or leave best_of out.",
            param="best_of",
        )


def _check_best_of_is_n(request: GenerationRequest) -> None:
    if request.best_of not in (None, request.num_choices):
        raise UnsupportedFeatureError(
            f"best_of={request.best_of} with n={request.num_choices} is supported only by "
            "/v1/completions without use_beam_search; leave it out, or send it equal to n.",
            param="best_of",
        )


def check_range(name: str, value: int | None, *, low: int, high: int) -> None:
    """Checks a number unless it is None.

    Raises:
        InvalidRequestError: The number is not in `[low, high]`.
    """
    if value is not None and not low <= value <= high:
        raise InvalidRequestError(f"{name} must be in [{low}, {high}], got {value}.", param=name)
