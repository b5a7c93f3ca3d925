"""SamplingParams and BeamSearchParams: how a request's tokens are chosen, and when it stops."""

import dataclasses
import itertools
from collections.abc import Sequence

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError

# Number of log-probabilities that the device selects; `RunnerConfig.max_logprobs` may allow more.
MAX_LOGPROBS = 20
# Largest number of completions of one request, as in OpenAI's API.
MAX_N = 128
# Every step of a beam search considers the 2 * beam_width most likely tokens of each beam.
MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
MAX_STOP_STRINGS = 64
MAX_STOP_STRING_CHARS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_LOGIT_BIASES = 1024
MAX_LOGIT_BIAS = 100.0
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 256
# Each bad word has two spellings: with and without a space before it.
MAX_BAD_WORD_SEQUENCES = 2 * MAX_BAD_WORDS
MAX_BAD_WORD_TOKENS = 16
MAX_PENALTY = 2.0
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 1e-3, 1e3
# Below this, dividing by the temperature overflows f32; such requests are sampled greedily.
MIN_TEMPERATURE = 1e-5
# Means no seed, like None.
NO_SEED = -1
_MAX_SEED = 2**63 - 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling and stopping of one request, with vLLM's field names and defaults.

    Args:
        n: Number of completions of the prompt, in [1, 128]. Several completions are sampled
            independently, so they need a temperature. The prompt is computed once, and its KV
            blocks are shared.
        temperature: 0 is greedy; otherwise logits are divided by it. In [0, 100].
        top_k: Keep the k most likely tokens; 0 or -1 keeps all.
        top_p: Keep the smallest set of most likely tokens whose probability reaches it, in (0, 1].
        min_p: Drop tokens less likely than `min_p` times the most likely one, in [0, 1].
        seed: With a seed, the random numbers depend only on the seed and the position, not on the
            batch. Completion i is sampled with `seed + i`, in 64 bits. -1 and None mean no seed.
        max_tokens: Largest number of new tokens, at least 1; None means up to max_model_len.
        min_tokens: Before this number of new tokens, EOS and stop tokens are not sampled, and stop
            strings are ignored. At most `max_tokens`.
        stop: Strings that end the text; the text is cut before them unless
            `include_stop_str_in_output`.
        stop_token_ids: Tokens that end the request, besides the model's EOS.
        ignore_eos: Continue after the model's EOS token.
        logprobs: Number of most likely tokens to report per position, besides the sampled one. At
            most the engine's `max_logprobs`; -1 reports all tokens, None reports no
            log-probabilities. They are computed before temperature and filters.
        prompt_logprobs: The same for the tokens of the prompt. The whole prompt is then computed,
            without the prefix cache.
        presence_penalty: Subtracted from the logit of each token in the output, in [-2, 2].
        frequency_penalty: Subtracted once per occurrence of the token in the output, in [-2, 2].
        repetition_penalty: For tokens in prompt or output, divides positive logits and multiplies
            negative ones, in [0.001, 1000].
        bad_words: At most 128 strings whose token sequences are not sampled.
        allowed_token_ids: The only tokens that may be sampled; None allows all tokens.
        logit_bias: Token id -> number in [-100, 100] that is added to its logit; at most 1024.
        detokenize: False produces no text; then `stop` is rejected.
        skip_special_tokens: Omit special tokens from the text.
        spaces_between_special_tokens: False removes the space that some tokenizers put between two
            special tokens in the text.
        structured_outputs: The format that the output must have; None for any.

    Raises:
        InvalidRequestError: A value is out of range or of the wrong type.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    skip_reading_prefix_cache: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_penalties()
        self._check_tokens()
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequestError(
                "structured_outputs must be StructuredOutputsParams or None, got "
                f"{type(self.structured_outputs).__name__}.",
                param="structured_outputs",
            )

    def _check_numbers(self) -> None:
        _check_int("n", self.n, low=1, high=MAX_N)
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_float("top_p", self.top_p, low=0.0, high=1.0, low_is_open=True)
        _check_float("min_p", self.min_p, low=0.0, high=1.0)
        _check_int("top_k", self.top_k, low=-1, high=2**31 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, low=-_MAX_SEED - 1, high=_MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=-1, high=2**31 - 1)
        if self.n > 1 and self.is_greedy:
            raise InvalidRequestError(
                f"n={self.n} greedy completions would all be the same one; n must be 1 when the "
                f"temperature is 0, got temperature={self.temperature!r}. Send a temperature, or "
                "leave n out.",
                param="n",
            )
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "spaces_between_special_tokens",
            "skip_reading_prefix_cache",
        ):
            _check_bool(name, getattr(self, name))

    def _check_penalties(self) -> None:
        for name in ("presence_penalty", "frequency_penalty"):
            _check_float(name, getattr(self, name), low=-MAX_PENALTY, high=MAX_PENALTY)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            low=MIN_REPETITION_PENALTY,
            high=MAX_REPETITION_PENALTY,
        )
        high = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        _check_int("min_tokens", self.min_tokens, low=0, high=high)

    def _check_tokens(self) -> None:
        words = () if self.bad_words is None else self.bad_words
        if (
            not isinstance(words, (list, tuple))
            or len(words) > MAX_BAD_WORDS
            or not all(isinstance(w, str) and 0 < len(w) <= MAX_BAD_WORD_CHARS for w in words)
        ):
            raise InvalidRequestError(
                f"bad_words must be a list of at most {MAX_BAD_WORDS} strings of 1 to "
                f"{MAX_BAD_WORD_CHARS} characters, got {_shortened(self.bad_words)}.",
                param="bad_words",
            )
        ids = self.allowed_token_ids
        if ids is not None:
            is_list = isinstance(ids, (list, tuple))
            if not is_list or not 1 <= len(ids) <= MAX_ALLOWED_TOKEN_IDS:
                raise InvalidRequestError(
                    "allowed_token_ids must be a list of at least one token id, got "
                    f"{_shortened(ids)}. Leave it out to allow all.",
                    param="allowed_token_ids",
                )
            # Checking a million ids one by one would take too long.
            if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= 2**31:
                for token_id in ids:
                    _check_int("allowed_token_ids", token_id, low=0, high=2**31 - 1)
        biases = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(biases, dict) or len(biases) > MAX_LOGIT_BIASES:
            raise InvalidRequestError(
                f"logit_bias must map at most {MAX_LOGIT_BIASES} token ids to numbers, got "
                f"{_shortened(biases)}.",
                param="logit_bias",
            )
        for token_id, bias in biases.items():
            _check_int("logit_bias", token_id, low=0, high=2**31 - 1)
            _check_float("logit_bias", bias, low=-MAX_LOGIT_BIAS, high=MAX_LOGIT_BIAS)

    def _check_stops(self) -> None:
        stops = self.stop_strings
        if not all(isinstance(s, str) and s for s in stops):
            raise InvalidRequestError(
                f"stop must be a non-empty string or a list of them, got {_shortened(self.stop)}.",
                param="stop",
            )
        check_stop_sizes("stop", stops)
        if stops and not self.detokenize:
            raise InvalidRequestError(
                "stop strings are found in text, so they need detokenize=True; "
                "use stop_token_ids instead.",
                param="stop",
            )
        ids = () if self.stop_token_ids is None else self.stop_token_ids
        if not isinstance(ids, (list, tuple)) or len(ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidRequestError(
                f"stop_token_ids must be a list of at most {MAX_STOP_TOKEN_IDS} token ids.",
                param="stop_token_ids",
            )
        for token_id in ids:
            _check_int("stop_token_ids", token_id, low=0, high=2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < MIN_TEMPERATURE

    @property
    def has_penalties(self) -> bool:
        """Whether previous tokens change the logits of the next one."""
        return (
            self.presence_penalty != 0
            or self.frequency_penalty != 0
            or self.repetition_penalty != 1
        )

    @property
    def changes_logits(self) -> bool:
        """Whether any setting except `min_tokens` changes the logits before sampling."""
        return (
            self.has_penalties
            or bool(self.bad_words)
            or self.allowed_token_ids is not None
            or bool(self.logit_bias)
        )

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple of strings."""
        if self.stop is None:
            return ()
        if isinstance(self.stop, str):
            return (self.stop,)
        if not isinstance(self.stop, (list, tuple)):
            raise InvalidRequestError(
                f"stop must be a string or a list of strings, got {_shortened(self.stop)}.",
                param="stop",
            )
        return tuple(self.stop)


def check_stop_sizes(name: str, stops: Sequence[str]) -> None:
    """Checks the number of stop strings and their lengths.

    Args:
        name: The name of the request's field.

    Raises:
        InvalidRequestError: There are too many stop strings, or one is too long.
    """
    if len(stops) > MAX_STOP_STRINGS or any(len(s) > MAX_STOP_STRING_CHARS for s in stops):
        raise InvalidRequestError(
            f"{name} may hold at most {MAX_STOP_STRINGS} strings of at most "
            f"{MAX_STOP_STRING_CHARS} characters, got {len(stops)} strings, the longest of "
            f"{max(map(len, stops))} characters.",
            param=name,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Settings of one beam search, with vLLM's field names and defaults.

    Args:
        beam_width: Number of sequences kept at every step and returned at the end, in [1, 10].
        max_tokens: Largest number of new tokens, at least 1; None means up to max_model_len.
        ignore_eos: Continue after the model's EOS token, as after any other token.
        temperature: The candidates of each beam are its `2 * beam_width` most likely tokens. Above
            0, one token sampled at this temperature is added to them. In [0, 100].
        length_penalty: Sequences are ranked by `cum_logprob / length**length_penalty`, in
            [-10, 10]. The length counts prompt and new tokens without EOS.
        include_stop_str_in_output: Whether the text shows the EOS token.

    Raises:
        InvalidRequestError: A value is out of range or of the wrong type.
    """

    beam_width: int
    max_tokens: int | None
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, low=1, high=MAX_BEAM_WIDTH)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=1, high=2**31 - 1)
        _check_float("temperature", self.temperature, low=0.0, high=100.0)
        _check_float("length_penalty", self.length_penalty, low=-10.0, high=10.0)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)


def is_wide(num_logprobs: int | None) -> bool:
    """Whether a request needs more log-probabilities than the device selects."""
    return num_logprobs is not None and (num_logprobs == -1 or num_logprobs > MAX_LOGPROBS)


def check_num_logprobs(
    name: str, num_logprobs: int | None, *, max_logprobs: int, vocab_size: int
) -> None:
    """Checks a request's number of log-probabilities per position against the engine's limit.

    Args:
        name: Name of the request's field.
        num_logprobs: The request's number; -1 for the whole vocabulary.
        max_logprobs: The engine's limit; -1 for the whole vocabulary.

    Raises:
        InvalidRequestError: The number exceeds the limit.
    """
    if num_logprobs is None:
        return
    num_wanted = vocab_size if num_logprobs == -1 else num_logprobs
    most = vocab_size if max_logprobs == -1 else max_logprobs
    if num_wanted > most:
        raise InvalidRequestError(
            f"{name}={num_logprobs} asks for {num_wanted} tokens of each position; at most {most} "
            "are allowed. Ask for fewer, or start the server with a larger --max-logprobs (-1 is "
            "the whole vocabulary).",
            param=name,
        )


def _check_float(
    name: str, value: object, *, low: float, high: float, low_is_open: bool = False
) -> None:
    # `type` instead of isinstance: True is an int, and a NumPy scalar cannot be sent to the engine.
    # NaN fails every comparison.
    is_number = type(value) in (int, float)
    if not is_number or not (low < value if low_is_open else low <= value) or not value <= high:
        left = "(" if low_is_open else "["
        raise InvalidRequestError(
            f"{name} must be a number in {left}{low}, {high}], got {value!r}.", param=name
        )


def _check_int(name: str, value: object, *, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidRequestError(
            f"{name} must be an integer in [{low}, {high}], got {value!r}.", param=name
        )


def _shortened(value: object, max_chars: int = 200) -> str:
    """The value's repr for an error message, cut to `max_chars`."""
    # Cut the value first, so that a huge value is not converted to text as a whole.
    if isinstance(value, (list, tuple, str)):
        value = value[:max_chars]
    elif isinstance(value, dict):
        value = dict(itertools.islice(value.items(), max_chars))
    text = repr(value)
    return text if len(text) <= max_chars else f"{text[:max_chars]}..."


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be true or false, got {value!r}.", param=name)
