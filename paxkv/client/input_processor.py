"""`InputProcessor`: turns a prompt and its parameters into a checked `EngineRequest`."""

import dataclasses
import functools
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from paxkv.config.sampling_params import (
    MAX_BAD_WORD_TOKENS,
    MAX_LOGPROBS,
    NO_SEED,
    SamplingParams,
    check_num_logprobs,
)
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.protocols import GrammarChecker
from paxkv.errors import (
    InvalidRequestError,
    NeverFitsError,
    PromptTooLongError,
    UnsupportedFeatureError,
    prompt_too_long,
)
from paxkv.text.tokenizer import Tokenizer

# "text", [1, 2, 3], {"prompt": "text"} or {"prompt_token_ids": [1, 2, 3]}
Prompt = str | Sequence[int] | Mapping[str, object]
PROMPT_KEYS = frozenset(
    {
        *("prompt", "prompt_token_ids", "add_special_tokens", "cache_salt"),
        *("truncate_prompt_tokens", "truncation_side", "num_leading_chars"),
    }
)
MAX_PRIORITY = 2**63 - 1


class InputProcessor:
    """Checks and tokenizes requests for one model.

    Args:
        tokenizer: With None, prompts must be token ids.
        vocab_size: Size of the model's vocabulary; token ids are in `[0, vocab_size)`.
        max_model_len: Maximum of prompt and output tokens together.
        max_fitting_tokens: Token positions of the whole KV pool, `(num_blocks - 1) * block_size`.
        max_prompt_tokens: Longest prompt that a step can compute; None with chunked prefill.
        eos_token_ids: EOS tokens from the model's configuration files.
        grammar_checker: With None, requests with a grammar are rejected.
        max_logprobs: Maximum number of log-probabilities per position; -1 is the vocabulary size.
        default_max_tokens: `max_tokens` of a request that does not set it, lowered to what fits;
            None is as many as fit.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        max_fitting_tokens: int,
        max_prompt_tokens: int | None = None,
        eos_token_ids: Sequence[int] = (),
        grammar_checker: GrammarChecker | None = None,
        max_logprobs: int = MAX_LOGPROBS,
        default_max_tokens: int | None = None,
    ) -> None:
        self._default_max_tokens = default_max_tokens
        self._max_logprobs = max_logprobs
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._max_fitting_tokens = max_fitting_tokens
        self._max_prompt_tokens = max_prompt_tokens
        self._eos_token_ids = all_eos_token_ids(tokenizer, eos_token_ids, vocab_size)
        self._grammar_checker = grammar_checker
        # Many conversations have the same leading messages.
        self._encode_leading = functools.lru_cache(maxsize=16)(self._encode)

    @property
    def grammar_checker(self) -> GrammarChecker | None:
        return self._grammar_checker

    def unchecked_grammar(self, sampling_params: SamplingParams) -> StructuredOutputsParams | None:
        """Returns the request's grammar if it is not checked yet, so `process` would check it."""
        if not isinstance(sampling_params, SamplingParams):
            return None  # `process` rejects it
        grammar, checker = sampling_params.structured_outputs, self._grammar_checker
        is_new = grammar is not None and checker is not None and not checker.is_remembered(grammar)
        return grammar if is_new else None

    def ignored_keywords(self, sampling_params: SamplingParams) -> tuple[str, ...]:
        """Places of schema keywords that the grammar of a processed request does not enforce."""
        grammar, checker = sampling_params.structured_outputs, self._grammar_checker
        return () if grammar is None or checker is None else checker.ignored_keywords(grammar)

    def process(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        checks_grammar: bool = True,
        cuts_max_tokens: bool = False,
    ) -> EngineRequest:
        """Returns the request in the form that the engine expects.

        Args:
            checks_grammar: Check that the grammar can be compiled.
            cuts_max_tokens: Lower `max_tokens` to what the KV pool has room for, as if it were a
                default. If False, a request that needs more is rejected.

        Raises:
            InvalidRequestError: The request is invalid; `param` names the field.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a non-empty string, got {request_id!r}.", param="request_id"
            )
        _check_is_unicode("request_id", request_id)
        self._check_sampling_params(sampling_params, checks_grammar=checks_grammar)
        token_ids, cache_salt = self._tokenize(prompt)
        num_prompt_tokens = len(token_ids)
        num_leading_tokens = self._count_leading_tokens(prompt, token_ids)
        num_kept = _checked_truncation(prompt)
        max_tokens, is_default = sampling_params.max_tokens, cuts_max_tokens or num_kept == "auto"
        if max_tokens is None:
            max_tokens, is_default = self._default_max_tokens, True
        if num_kept is not None:
            min_tokens = sampling_params.min_tokens
            num_kept = self._num_kept(
                len(token_ids), num_kept, max_tokens, min_tokens=min_tokens, is_default=is_default
            )
            keeps_first = _checked_truncation_side(prompt) == "right"
            token_ids = token_ids[:num_kept] if keeps_first else token_ids[-num_kept:]
            if not keeps_first and len(token_ids) < num_prompt_tokens:
                num_leading_tokens = 0
        self._check_prompt_length(len(token_ids))
        # After the length check, because an invalid prompt may have millions of tokens.
        self._check_token_ids(token_ids)
        grammar = sampling_params.structured_outputs
        bad_words = self._bad_words(sampling_params)
        scarce_token_ids = self._scarce_token_ids(sampling_params, bad_words)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=dataclasses.replace(
                sampling_params,
                max_tokens=self._cut_max_tokens(len(token_ids), max_tokens, is_default=is_default),
                # Replace NO_SEED (-1) before `n` completions get consecutive seeds: if the seed is
                # -2, completion 1 has the valid seed -1.
                seed=None if sampling_params.seed == NO_SEED else sampling_params.seed,
            ),
            eos_token_ids=self._eos_token_ids,
            arrival_time=time.time(),
            priority=_checked_priority(priority),
            cache_salt=cache_salt,
            bad_words_token_ids=bad_words,
            # If there is a grammar, it decides whether the output can continue or is complete.
            scarce_token_ids=scarce_token_ids if grammar is None else (),
            num_truncated_tokens=num_prompt_tokens - len(token_ids),
            num_leading_tokens=min(num_leading_tokens, len(token_ids)),
            needs_grammar=grammar is not None,
            has_heavy_grammar=grammar is not None and self._grammar_checker.is_heavy(grammar),
        )

    def _num_kept(
        self,
        num_prompt_tokens: int,
        num_kept: int | Literal["auto"],
        max_tokens: int | None,
        *,
        min_tokens: int,
        is_default: bool,
    ) -> int:
        """Returns how many prompt tokens `truncate_prompt_tokens` keeps; may exceed their number.

        -1 reserves room for `max_tokens`: if 100 tokens fit and `max_tokens` is 40, it keeps 60.
        If `max_tokens` may be lowered ("auto", or -1 with a default `max_tokens`), a prompt that
        fits together with `min_tokens` of output is kept whole. A longer prompt is cut to 60 tokens
        too. The reserved room is then at most half of the 100 tokens, or `min_tokens` if that is
        more: with `max_tokens` 70, 50 tokens are kept.

        Args:
            num_kept: The value of `truncate_prompt_tokens`.
            is_default: `max_tokens` may be lowered.

        Raises:
            InvalidRequestError: With -1, `max_tokens` leaves no room for a prompt.
        """
        if num_kept in (-1, "auto"):
            # + 1, because the last sampled token needs no position in the KV cache.
            most = min(self._max_model_len, self._max_fitting_tokens + 1)
            room = max_tokens or 1
            most_kept = most - 1
            if self._max_prompt_tokens is not None:
                most_kept = min(most_kept, self._max_prompt_tokens)
            if is_default:
                min_tokens = min(max(min_tokens, 1), most - 1)
                if num_prompt_tokens <= min(most_kept, most - min_tokens):
                    return num_prompt_tokens
                room = min(room, max(most // 2, min_tokens))
            elif room >= most:
                raise InvalidRequestError(
                    f"max_tokens={room} leaves no room for a prompt with "
                    f"truncate_prompt_tokens=-1: prompt and output together may have {most} tokens "
                    f"(the smaller of max_model_len={self._max_model_len} and the room of the KV "
                    f"cache). Ask for at most {most - 1} tokens, or send "
                    'truncate_prompt_tokens="auto", which lowers max_tokens instead.',
                    param="max_tokens",
                )
            num_kept = min(most - room, most_kept)
        return num_kept

    def _tokenize(self, prompt: Prompt) -> tuple[list[int], str | None]:
        """Returns the prompt's token ids and cache salt."""
        if isinstance(prompt, str):
            self._check_text_length(prompt)
            return self._encode(prompt, add_special_tokens=True), None
        if isinstance(prompt, Mapping):
            return self._tokenize_mapping(prompt)
        return _as_token_ids(prompt), None

    def _tokenize_mapping(self, prompt: Mapping[str, object]) -> tuple[list[int], str | None]:
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown:
            raise UnsupportedFeatureError(
                f"the prompt has unknown keys {unknown}; allowed keys are "
                f"{', '.join(sorted(PROMPT_KEYS))}. Leave the unknown keys out.",
                param="prompt",
            )
        cache_salt = prompt.get("cache_salt")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequestError(
                f"cache_salt must be a non-empty string, got {cache_salt!r}.", param="cache_salt"
            )
        _check_is_unicode("cache_salt", cache_salt or "")
        # If the prompt has both ids and text, the text is only the source of the ids.
        if prompt.get("prompt_token_ids") is not None:
            return _as_token_ids(prompt["prompt_token_ids"]), cache_salt
        text = prompt.get("prompt")
        if not isinstance(text, str):
            raise InvalidRequestError(
                "a prompt needs 'prompt' as text or 'prompt_token_ids' as a list of integers, "
                f"got {prompt!r}.",
                param="prompt",
            )
        if prompt.get("truncate_prompt_tokens") is None:
            self._check_text_length(text)
        add_special_tokens = bool(prompt.get("add_special_tokens", True))
        return self._encode(text, add_special_tokens=add_special_tokens), cache_salt

    def _count_leading_tokens(self, prompt: Prompt, token_ids: list[int]) -> int:
        """Number of tokens that any prompt with the same `num_leading_chars` begins with.

        The characters may end within a token of the prompt, which does not count then.
        """
        num_chars = prompt.get("num_leading_chars") if isinstance(prompt, Mapping) else None
        if num_chars is None:
            return 0
        text = prompt.get("prompt")
        if prompt.get("prompt_token_ids") is not None or not isinstance(text, str):
            raise InvalidRequestError(
                "num_leading_chars needs the prompt as text; leave it out, or send no "
                "prompt_token_ids.",
                param="prompt",
            )
        if type(num_chars) is not int or not 0 <= num_chars <= len(text):
            raise InvalidRequestError(
                f"num_leading_chars must be an integer in [0, {len(text)}], got {num_chars!r}.",
                param="prompt",
            )
        if num_chars == 0:
            return 0
        add_special_tokens = bool(prompt.get("add_special_tokens", True))
        leading_ids = self._encode_leading(text[:num_chars], add_special_tokens=add_special_tokens)
        pairs = enumerate(zip(leading_ids, token_ids, strict=False))
        num_most = min(len(leading_ids), len(token_ids))
        return next((idx for idx, (one, other) in pairs if one != other), num_most)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer, so it accepts no text. Send the prompt "
                "as a list of token ids, such as [1, 2, 3]. Chats need a tokenizer.",
                param="prompt",
            )
        _check_is_unicode("prompt", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return _as_token_ids(token_ids)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        """Checks that ids are in the model's vocabulary, which may lack tokens of the tokenizer."""
        for idx, token_id in enumerate(token_ids):
            # Not `isinstance`, which accepts True.
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt token {idx} is {token_id!r}; token ids are integers in "
                    f"[0, {self._vocab_size}).",
                    param="prompt",
                )

    def _check_text_length(self, text: str) -> None:
        """Rejects a text before tokenization if it is too long, whatever its tokens are."""
        # Shorter texts are tokenized quickly, and the check of their token count suffices.
        if self._tokenizer is None or len(text) < self._max_model_len:
            return
        max_chars_per_token = self._tokenizer.max_chars_per_token
        if max_chars_per_token is None:
            return
        least = -(-len(text) // max_chars_per_token)
        if least > self._max_model_len - 1:
            prompt = f"the prompt of {len(text)} characters"
            raise self._too_long(f"at least {least}", prompt=prompt)

    def _too_long(self, num_tokens: str, *, prompt: str = "the prompt") -> PromptTooLongError:
        return PromptTooLongError(
            prompt_too_long(
                num_tokens,
                self._max_model_len - 1,
                f"{self._max_model_len} tokens, of which at least one is for the answer",
                f"Shorten {prompt}, or start the engine with a larger max_model_len.",
            ),
            param="prompt",
        )

    def _check_prompt_length(self, num_prompt_tokens: int) -> None:
        if num_prompt_tokens > self._max_model_len - 1:
            raise self._too_long(str(num_prompt_tokens))
        if self._max_prompt_tokens is not None and num_prompt_tokens > self._max_prompt_tokens:
            raise PromptTooLongError(
                prompt_too_long(
                    str(num_prompt_tokens),
                    self._max_prompt_tokens,
                    f"{self._max_model_len} tokens, but without chunked prefill a prompt must fit "
                    "in one step",
                    "Shorten the prompt, or start the engine with chunked prefill or a larger "
                    "max_num_batched_tokens.",
                ),
                param="prompt",
            )
        if num_prompt_tokens > self._max_fitting_tokens:
            raise PromptTooLongError(
                prompt_too_long(
                    str(num_prompt_tokens),
                    self._max_fitting_tokens,
                    self._fitting_context,
                    "Shorten the prompt, or start the engine with more KV blocks.",
                ),
                param="prompt",
            )

    @property
    def _fitting_context(self) -> str:
        # + 1, because the last sampled token needs no position in the KV cache.
        return (
            f"{self._max_fitting_tokens + 1} tokens here, because the KV cache has no room for more"
        )

    def _cut_max_tokens(
        self, num_prompt_tokens: int, max_tokens: int | None, *, is_default: bool
    ) -> int:
        """Lowers `max_tokens` to what `max_model_len` allows; None becomes as many as fit.

        With max_model_len 100, a prompt of 90 tokens and max_tokens 50, the result is 10. This
        needs 99 positions in the KV cache, because the last token needs none.
        """
        most = self._max_model_len - num_prompt_tokens
        most_fitting = self._max_fitting_tokens + 1 - num_prompt_tokens
        max_tokens = most if max_tokens is None else min(max_tokens, most)
        if is_default:
            return min(max_tokens, most_fitting)
        if max_tokens > most_fitting:
            # The first sentence has Anthropic's wording, the second OpenAI's: clients search for it
            # and lower max_tokens.
            raise NeverFitsError(
                f"input length and `max_tokens` exceed context limit: {num_prompt_tokens} + "
                f"{max_tokens} > {self._max_fitting_tokens + 1}. This model's maximum context "
                f"length is {self._fitting_context}. Ask for at most {most_fitting} tokens, "
                "shorten the prompt, or start the engine with more KV blocks.",
                param="max_tokens",
            )
        return max_tokens

    def _check_sampling_params(
        self, sampling_params: SamplingParams, *, checks_grammar: bool
    ) -> None:
        if not isinstance(sampling_params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams, got {type(sampling_params).__name__}."
            )
        if self._tokenizer is None and sampling_params.stop_strings:
            raise InvalidRequestError(
                "stop strings need a tokenizer, and this model was loaded without one. Use "
                "stop_token_ids instead.",
                param="stop",
            )
        for stop_string in sampling_params.stop_strings:
            _check_is_unicode("stop", stop_string)
        if sampling_params.structured_outputs is not None:
            if self._grammar_checker is None:
                field = sampling_params.structured_outputs.field_of()
                raise UnsupportedFeatureError(
                    f"{field} asks for structured output, which needs a model with a tokenizer and "
                    "an EOS token. This model lacks one of them. Leave the field out.",
                    param=field.name,
                )
            if checks_grammar:
                self._grammar_checker.check(sampling_params.structured_outputs)
        allowed = sampling_params.allowed_token_ids
        if allowed is not None and len(allowed) > self._vocab_size:
            raise InvalidRequestError(
                f"allowed_token_ids has {len(allowed)} ids; the vocabulary has {self._vocab_size}. "
                "Send each id once.",
                param="allowed_token_ids",
            )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            bad = [i for i in getattr(sampling_params, name) or () if i >= self._vocab_size]
            if bad:
                raise InvalidRequestError(
                    f"{name} has {bad[0]}; token ids are in [0, {self._vocab_size}).", param=name
                )
        for name in ("logprobs", "prompt_logprobs"):
            check_num_logprobs(
                name,
                getattr(sampling_params, name),
                max_logprobs=self._max_logprobs,
                vocab_size=self._vocab_size,
            )

    def _bad_words(self, sampling_params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token ids of `bad_words`: each word at the start of a text, and after a space.

        Source: vllm/sampling_params.py, `update_from_tokenizer`.
        """
        bad_words = sampling_params.bad_words or ()
        if bad_words and self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer, and this model was loaded without one. Use logit_bias "
                "instead.",
                param="bad_words",
            )
        found: dict[tuple[int, ...], None] = {}
        for word in bad_words:
            _check_is_unicode("bad_words", word)
            plain, spaced = (
                tuple(self._tokenizer.encode(space + word.lstrip(), add_special_tokens=False))
                for space in ("", " ")
            )
            self._check_bad_word(word, plain)
            found[plain] = None
            # If `spaced` has more tokens, it is a space token followed by `plain`, which is
            # forbidden already.
            if spaced and spaced[0] != plain[0] and len(spaced) == len(plain):
                self._check_bad_word(word, spaced)
                found[spaced] = None
        return tuple(found)

    def _check_bad_word(self, word: str, token_ids: tuple[int, ...]) -> None:
        if not 1 <= len(token_ids) <= MAX_BAD_WORD_TOKENS:
            raise InvalidRequestError(
                f"a bad word must have 1 to {MAX_BAD_WORD_TOKENS} tokens; {word!r} has "
                f"{len(token_ids)}. Send a part of it.",
                param="bad_words",
            )
        if max(token_ids) >= self._vocab_size:
            raise InvalidRequestError(
                f"the bad word {word!r} has token {max(token_ids)}; the model's token ids are in "
                f"[0, {self._vocab_size}).",
                param="bad_words",
            )

    def _is_token(self, token_id: int) -> bool:
        """True if the model may generate `token_id`; some ids of its vocabulary have no token."""
        if self._tokenizer is None or token_id in self._eos_token_ids:
            return True
        return self._tokenizer.has_text(token_id, skip_special_tokens=False)

    def _scarce_token_ids(
        self, sampling_params: SamplingParams, bad_words: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """Returns `EngineRequest.scarce_token_ids`; rejects settings that allow no token."""
        allowed = sampling_params.allowed_token_ids
        never = {word[0] for word in bad_words if len(word) == 1}
        early = set()
        if sampling_params.min_tokens > 0:
            early.update(self._eos_token_ids, sampling_params.stop_token_ids or ())
        sometimes = early.union(word[-1] for word in bad_words if len(word) > 1)
        candidates = range(self._vocab_size)
        if allowed is not None:
            # The model never generates ids without a token.
            candidates = [i for i in dict.fromkeys(allowed) if self._is_token(i)]
            if not candidates:
                raise InvalidRequestError(
                    f"allowed_token_ids={allowed[:10]} has no id of a token: the tokenizer has "
                    f"{self._tokenizer.vocab_size} tokens, and the other ids of the model's "
                    f"{self._vocab_size} are never generated. Send ids of tokens.",
                    param="allowed_token_ids",
                )
        # Usually true for the first candidate.
        if any(i not in never and i not in sometimes for i in candidates):
            return ()
        left = tuple(i for i in candidates if i not in never)
        if early.issuperset(left):
            source = f"the model's {self._vocab_size} token ids leave"
            if allowed is not None:
                source = f"allowed_token_ids={allowed[:10]} leaves"
            raise InvalidRequestError(
                f"{source} no token: each is one of the bad_words, or would end the request before "
                "min_tokens. Allow more tokens.",
                param="bad_words" if allowed is None else "allowed_token_ids",
            )
        return left


def all_eos_token_ids(
    tokenizer: Tokenizer | None, model_eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """Returns the tokenizer's EOS token, then the EOS tokens of the model's configuration."""
    has_own = tokenizer is not None and tokenizer.eos_token_id is not None
    first = [tokenizer.eos_token_id] if has_own else []
    found = dict.fromkeys([*first, *model_eos_token_ids])
    return tuple(token_id for token_id in found if token_id < vocab_size)


def text_of_prompt(prompt: Prompt) -> str | None:
    """Returns the prompt's text; None if it has only token ids."""
    if isinstance(prompt, str):
        return prompt
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return text if isinstance(text, str) else None


def _checked_truncation(prompt: Prompt) -> int | Literal["auto"] | None:
    """Returns the prompt's `truncate_prompt_tokens`, checked."""
    num_kept = prompt.get("truncate_prompt_tokens") if isinstance(prompt, Mapping) else None
    is_number = type(num_kept) is int and (num_kept == -1 or num_kept >= 1)
    if not is_number and num_kept not in (None, "auto"):
        raise InvalidRequestError(
            f'truncate_prompt_tokens must be "auto", -1 or at least 1, got {num_kept!r}.',
            param="truncate_prompt_tokens",
        )
    return num_kept


def _checked_truncation_side(prompt: Prompt) -> str:
    """Returns the prompt's `truncation_side`: the end that is cut off."""
    side = prompt.get("truncation_side") if isinstance(prompt, Mapping) else None
    if side not in (None, "left", "right"):
        raise InvalidRequestError(
            f'truncation_side must be "left" or "right", got {side!r}.', param="truncation_side"
        )
    return side or "left"


def _as_token_ids(token_ids: object) -> list[int]:
    """Converts a prompt to a list of token ids; does not check the ids themselves."""
    if not isinstance(token_ids, Sequence) or isinstance(token_ids, (str, bytes)):
        raise InvalidRequestError(
            "a prompt must be text, a list of token ids, or an object with 'prompt' or "
            f"'prompt_token_ids', got {type(token_ids).__name__}.",
            param="prompt",
        )
    if not token_ids:
        raise InvalidRequestError("the prompt is empty; send at least one token.", param="prompt")
    return list(token_ids)


def _check_is_unicode(param: str, text: str) -> None:
    """Rejects lone surrogates: they are not characters and cannot be sent to the engine."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode: it has a lone surrogate at character {error.start}. "
            "Remove it.",
            param=param,
        ) from error


def _checked_priority(priority: object) -> int:
    is_int = isinstance(priority, int) and not isinstance(priority, bool)
    if not is_int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequestError(
            f"priority must be an integer in [-2**63 + 1, 2**63 - 1], got {priority!r}.",
            param="priority",
        )
    return priority
