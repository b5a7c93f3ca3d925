"""`InputProcessor`: a prompt and its parameters become an `EngineRequest`; mistakes end here."""

import dataclasses
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
        *("truncate_prompt_tokens", "truncation_side"),
    }
)
MAX_PRIORITY = 2**63 - 1


class InputProcessor:
    """Checks and tokenises requests for one model.

    Args:
        tokenizer: None serves prompts of token ids only.
        vocab_size: Of the model; token ids are in `[0, vocab_size)`.
        max_model_len: Most tokens of prompt and output together.
        max_fitting_tokens: Token positions of the whole KV pool, `(num_blocks - 1) * block_size`.
        max_prompt_tokens: Longest prompt that a step can take on; None is any, in pieces.
        eos_token_ids: The model's own, from its configuration files.
        grammar_checker: None refuses requests with a grammar.
        max_logprobs: Most log-probabilities of a position; -1 is the whole vocabulary.
        default_max_tokens: Most new tokens of a request that leaves them open; None is as many as
            fit. More than fit count as these, too.
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

    @property
    def grammar_checker(self) -> GrammarChecker | None:
        return self._grammar_checker

    def unchecked_grammar(self, sampling_params: SamplingParams) -> StructuredOutputsParams | None:
        """The form for which `process` would wait, until it is compiled on trial."""
        if not isinstance(sampling_params, SamplingParams):
            return None  # which `process` refuses
        form, checker = sampling_params.structured_outputs, self._grammar_checker
        is_unchecked = form is not None and checker is not None and not checker.is_remembered(form)
        return form if is_unchecked else None

    def ignored_keywords(self, sampling_params: SamplingParams) -> tuple[str, ...]:
        """The places of schema keywords that the grammar of a processed request leaves out."""
        form, checker = sampling_params.structured_outputs, self._grammar_checker
        return () if form is None or checker is None else checker.ignored_keywords(form)

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
        """The request as the engine takes it.

        Args:
            checks_grammar: False leaves open whether its grammar can be compiled.
            cuts_max_tokens: Whether its `max_tokens` is a default too, of which as many count as
                fit; else more than the KV pool has room for are refused.

        Raises:
            InvalidRequestError: Or one of its subclasses; `param` names the field.
        """
        if not isinstance(request_id, str) or not request_id:
            raise InvalidRequestError(
                f"request_id must be a non-empty string, got {request_id!r}.", param="request_id"
            )
        _check_is_unicode("request_id", request_id)
        self._check_sampling_params(sampling_params, checks_grammar=checks_grammar)
        token_ids, cache_salt = self._tokenize(prompt)
        num_prompt_tokens = len(token_ids)
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
        self._check_prompt_length(len(token_ids))
        # Not before: there may be millions.
        self._check_token_ids(token_ids)
        form = sampling_params.structured_outputs
        bad_words = self._bad_words(sampling_params)
        scarce_token_ids = self._scarce_token_ids(sampling_params, bad_words)
        return EngineRequest(
            request_id=request_id,
            prompt_token_ids=token_ids,
            sampling_params=dataclasses.replace(
                sampling_params,
                max_tokens=self._cut_max_tokens(len(token_ids), max_tokens, is_default=is_default),
                # Here, because completion 1 of several with seed -2 has the seed -1.
                seed=None if sampling_params.seed == NO_SEED else sampling_params.seed,
            ),
            eos_token_ids=self._eos_token_ids,
            arrival_time=time.time(),
            priority=_checked_priority(priority),
            cache_salt=cache_salt,
            bad_words_token_ids=bad_words,
            # A grammar knows better what is left, and whether it is complete without.
            scarce_token_ids=scarce_token_ids if form is None else (),
            num_truncated_tokens=num_prompt_tokens - len(token_ids),
            needs_grammar=form is not None,
            has_heavy_grammar=form is not None and self._grammar_checker.is_heavy(form),
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
        """How many tokens of a prompt stay, as `truncate_prompt_tokens` says; or more than it has.

        With -1, `max_tokens` have their room: of 100 in all, 40 leave 60 of each longer prompt.
        "auto", and -1 where they are a default, cut no prompt that fits by itself: 80 tokens stay,
        and 150 become 60, or 50 where more than half of the room would go to the output, but for
        `min_tokens`.

        Raises:
            InvalidRequestError: With -1, `max_tokens` leave no room for any prompt.
        """
        if num_kept in (-1, "auto"):
            # The last token is never fed back.
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
                    f"max_tokens={room} leaves no room for a prompt, which truncate_prompt_tokens="
                    f"-1 cuts to what is left: both may have {most} tokens together, of "
                    f"max_model_len={self._max_model_len} and what the KV cache has room for. Ask "
                    f'for at most {most - 1} tokens, or send truncate_prompt_tokens="auto", which '
                    "makes max_tokens fewer instead.",
                    param="max_tokens",
                )
            num_kept = min(most - room, most_kept)
        return num_kept

    def _tokenize(self, prompt: Prompt) -> tuple[list[int], str | None]:
        """The prompt's token ids and cache salt."""
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
                f"a prompt may have the keys {', '.join(sorted(PROMPT_KEYS))}; got also {unknown}.",
                param="prompt",
            )
        cache_salt = prompt.get("cache_salt")
        if cache_salt is not None and (not isinstance(cache_salt, str) or not cache_salt):
            raise InvalidRequestError(
                f"cache_salt must be a non-empty string, got {cache_salt!r}.", param="cache_salt"
            )
        _check_is_unicode("cache_salt", cache_salt or "")
        # With both, the text is only what the ids were made from.
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

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise InvalidRequestError(
                "this model was loaded without a tokenizer, so it takes no text; send the prompt "
                "as a list of token ids, such as [1, 2, 3]. Chats need a tokenizer.",
                param="prompt",
            )
        _check_is_unicode("prompt", text)
        token_ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        return _as_token_ids(token_ids)

    def _check_token_ids(self, token_ids: list[int]) -> None:
        """Those that a tokenizer made too: it may know more tokens than the model."""
        for idx, token_id in enumerate(token_ids):
            # Not isinstance: True is an int, but no token id.
            if type(token_id) is not int or not 0 <= token_id < self._vocab_size:
                raise InvalidRequestError(
                    f"prompt token {idx} is {token_id!r}; token ids are integers in "
                    f"[0, {self._vocab_size}).",
                    param="prompt",
                )

    def _check_text_length(self, text: str) -> None:
        """Refuses a text that is too long whatever its tokens are, before they are looked for."""
        # Short texts come in a hurry, and their tokens are counted soon enough.
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
        # The last token is never fed back.
        return (
            f"{self._max_fitting_tokens + 1} tokens here, because the KV cache has no room for more"
        )

    def _cut_max_tokens(
        self, num_prompt_tokens: int, max_tokens: int | None, *, is_default: bool
    ) -> int:
        """`max_tokens` as a number within max_model_len; None is as many as fit.

        With max_model_len 100, a prompt of 90 tokens and max_tokens 50 it is 10. The last of these
        is never fed back, so 99 positions are needed.
        """
        most = self._max_model_len - num_prompt_tokens
        most_fitting = self._max_fitting_tokens + 1 - num_prompt_tokens
        max_tokens = most if max_tokens is None else min(max_tokens, most)
        if is_default:
            return min(max_tokens, most_fitting)
        if max_tokens > most_fitting:
            # Anthropic's words, after which clients lower max_tokens, and then OpenAI's.
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
                "stop strings are found in text, and this model was loaded without a tokenizer; "
                "use stop_token_ids instead.",
                param="stop",
            )
        for stop_string in sampling_params.stop_strings:
            _check_is_unicode("stop", stop_string)
        if sampling_params.structured_outputs is not None:
            if self._grammar_checker is None:
                field = sampling_params.structured_outputs.field_of()
                raise UnsupportedFeatureError(
                    f"{field} asks for structured output, which needs a model with a tokenizer and "
                    "an EOS token. This model has not both; leave the field out.",
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
        """Token ids of `bad_words`, without a space before each and, where it is one, with it.

        Source: vllm/sampling_params.py, `update_from_tokenizer`.
        """
        bad_words = sampling_params.bad_words or ()
        if bad_words and self._tokenizer is None:
            raise InvalidRequestError(
                "bad words are text, and this model was loaded without a tokenizer; use logit_bias "
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
            # " word" as many other tokens is the word within a text; as more tokens it is a space
            # and then the word, which is ruled out already.
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
        """Whether the model may generate a token; its vocabulary may have ids that no token has."""
        if self._tokenizer is None or token_id in self._eos_token_ids:
            return True
        return self._tokenizer.has_text(token_id, skip_special_tokens=False)

    def _scarce_token_ids(
        self, sampling_params: SamplingParams, bad_words: Sequence[tuple[int, ...]]
    ) -> tuple[int, ...]:
        """`EngineRequest.scarce_token_ids`; refuses settings that allow no token at all."""
        allowed = sampling_params.allowed_token_ids
        never = {word[0] for word in bad_words if len(word) == 1}
        early = set()
        if sampling_params.min_tokens > 0:
            early.update(self._eos_token_ids, sampling_params.stop_token_ids or ())
        sometimes = early.union(word[-1] for word in bad_words if len(word) > 1)
        candidates = range(self._vocab_size)
        if allowed is not None:
            # Other ids are never generated.
            candidates = [i for i in dict.fromkeys(allowed) if self._is_token(i)]
            if not candidates:
                raise InvalidRequestError(
                    f"allowed_token_ids={allowed[:10]} has no token: the tokenizer has "
                    f"{self._tokenizer.vocab_size} tokens, and the rest of the model's "
                    f"{self._vocab_size} ids are never generated. Send ids of tokens.",
                    param="allowed_token_ids",
                )
        # Nearly always the first one is free.
        if any(i not in never and i not in sometimes for i in candidates):
            return ()
        left = tuple(i for i in candidates if i not in never)
        if early.issuperset(left):
            asked = f"the model's {self._vocab_size} token ids leave"
            if allowed is not None:
                asked = f"allowed_token_ids={allowed[:10]} leaves"
            raise InvalidRequestError(
                f"{asked} no token: all of them are bad_words, or end the request before "
                "min_tokens.",
                param="bad_words" if allowed is None else "allowed_token_ids",
            )
        return left


def all_eos_token_ids(
    tokenizer: Tokenizer | None, model_eos_token_ids: Sequence[int], vocab_size: int
) -> tuple[int, ...]:
    """The tokenizer's EOS token first, then those of the model's configuration files."""
    has_own = tokenizer is not None and tokenizer.eos_token_id is not None
    first = [tokenizer.eos_token_id] if has_own else []
    found = dict.fromkeys([*first, *model_eos_token_ids])
    return tuple(token_id for token_id in found if token_id < vocab_size)


def text_of_prompt(prompt: Prompt) -> str | None:
    """The prompt as text, or None when it came as token ids alone."""
    if isinstance(prompt, str):
        return prompt
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    return text if isinstance(text, str) else None


def _checked_truncation(prompt: Prompt) -> int | Literal["auto"] | None:
    """Its `truncate_prompt_tokens`."""
    num_kept = prompt.get("truncate_prompt_tokens") if isinstance(prompt, Mapping) else None
    is_number = type(num_kept) is int and (num_kept == -1 or num_kept >= 1)
    if not is_number and num_kept not in (None, "auto"):
        raise InvalidRequestError(
            f'truncate_prompt_tokens must be "auto", -1 or at least 1, got {num_kept!r}.',
            param="truncate_prompt_tokens",
        )
    return num_kept


def _checked_truncation_side(prompt: Prompt) -> str:
    """Its `truncation_side`: the end that is cut off."""
    side = prompt.get("truncation_side") if isinstance(prompt, Mapping) else None
    if side not in (None, "left", "right"):
        raise InvalidRequestError(
            f'truncation_side must be "left" or "right", got {side!r}.', param="truncation_side"
        )
    return side or "left"


def _as_token_ids(token_ids: object) -> list[int]:
    """What came as token ids, as a list of them that are not looked at yet."""
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
    """Refuses lone surrogates: they are no characters, and cannot cross to the engine."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"{param} is not valid Unicode: a lone surrogate at character {error.start}.",
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
