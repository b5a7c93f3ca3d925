"""`GrammarCompiler`: a form that was asked for becomes a matcher of llguidance, within limits."""

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import llguidance
import numpy as np

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import InvalidRequestError, UnsupportedFeatureError
from paxkv.structured_output.grammar_syntax import NO_FORCING, to_lark
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.structural_format import StructuralFormat
from paxkv.structured_output.thoughts import ThoughtTokens, find_thought_tokens
from paxkv.structured_output.token_texts import TokenTexts

# Some applications send the same few schemas with every request.
MAX_CACHED_GRAMMARS = 64
_NUM_TRIED_TOKENS = 4
# A reason is shown to whoever sent the grammar, and may quote it.
MAX_REASON_CHARS = 400
# Between the parts of JSON. Without an end small models never come out of it.
_WHITESPACE = r"[ \t\r\n]{1,32}"
# Of a schema: what holds others under names that are the client's, and what holds answers.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum")
# What a matcher is made from: kind, source and options.
_Key = tuple[str, str, bool, str | None, bool]
# What one grammar may take, at most: about 0.1 s and 50 MB to build, and 0.05 s a step. Ordinary
# schemas stay far below.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=25_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Compiles for one model. Safe for threads, which run beside each other as it computes.

    Args:
        tokenizer_json: Content of the model's tokenizer.json.
        vocab_size: Of the model, which may have more tokens than the tokenizer.
        eos_token_ids: At least one; what may be drawn where a grammar is complete.
        thought_token_ids: `<think>` and `</think>`; None where it has no such tokens.

    """

    def __init__(
        self,
        tokenizer_json: str,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        thought_token_ids: tuple[int, int] | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self._tokenizer_json = tokenizer_json
        self._eos_token_ids = list(eos_token_ids)
        # Made for the first grammar: with a large vocabulary it takes a second or two.
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._thought_token_ids = thought_token_ids
        self._token_texts: TokenTexts | None = None
        self._thought_tokens: ThoughtTokens | None = None
        self._lock = threading.Lock()
        # The most recently used one last. A copy of it starts anew.
        self._matchers: OrderedDict[_Key, llguidance.LLMatcher] = OrderedDict()

    @property
    def num_mask_words(self) -> int:
        """Of 32 bits, in the mask of one request."""
        return (self.vocab_size + 31) // 32

    def check(self, params: StructuredOutputsParams) -> None:
        """Raises what `compile` raises."""
        self.compile(params)

    def compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """A matcher in front of its first token.

        Raises:
            InvalidRequestError: It cannot be compiled within the limits.
        """
        if params.thoughts != "none":
            self.thought_tokens()
        key = _key(params)
        with self._lock:
            matcher = self._matchers.get(key)
            if matcher is not None:
                self._matchers.move_to_end(key)
        if matcher is None:
            matcher = self._compile_new(params)
            with self._lock:
                self._matchers[key] = matcher
                if len(self._matchers) > MAX_CACHED_GRAMMARS:
                    self._matchers.popitem(last=False)
        return matcher.deep_copy()

    def is_cached(self, params: StructuredOutputsParams) -> bool:
        """Whether `compile` takes no time."""
        with self._lock:
            return _key(params) in self._matchers

    def token_texts(self) -> TokenTexts:
        """The model's tokens as bytes; the first call takes a while."""
        tokenizer = self._get_tokenizer()
        with self._lock:
            if self._token_texts is None:
                self._token_texts = TokenTexts(tokenizer)
            return self._token_texts

    def thought_tokens(self) -> ThoughtTokens:
        """What the model's thoughts are told apart by.

        Raises:
            UnsupportedFeatureError: It has no tokens for that.
        """
        if self._thought_token_ids is None:
            raise UnsupportedFeatureError(
                "thoughts before a form need a model with <think> and </think> as tokens, which "
                "this one has not.",
                param="structured_outputs",
            )
        token_bytes = self.token_texts().by_id
        with self._lock:
            if self._thought_tokens is None:
                open_id, close_id = self._thought_token_ids
                self._thought_tokens = find_thought_tokens(
                    token_bytes,
                    open_id=open_id,
                    close_id=close_id,
                    eos_token_ids=self._eos_token_ids,
                    num_words=self.num_mask_words,
                )
            return self._thought_tokens

    def _get_tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = make_grammar_tokenizer(
                        self._tokenizer_json,
                        vocab_size=self.vocab_size,
                        eos_token_ids=self._eos_token_ids,
                    )
                except ValueError as error:
                    raise UnsupportedFeatureError(
                        f"this model's tokenizer cannot be used for grammars: {error}.",
                        param="structured_outputs",
                    ) from error
            return self._tokenizer

    def _compile_new(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        try:
            grammar = _grammar(params)
        except (ValueError, RecursionError) as error:
            raise _cannot_compile(params, str(error)) from None
        matcher = llguidance.LLMatcher(self._get_tokenizer(), grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _cannot_compile(params, matcher.get_error())
        # What a grammar costs shows at the first masks; a limit that the first one reaches is
        # told of by the second.
        for _ in range(2):
            first = matcher.deep_copy()
            mask_np = np.frombuffer(first.compute_bitmask(), np.uint8)
            if first.is_error():
                raise _cannot_compile(params, first.get_error())
        if not mask_np.any():
            raise _cannot_compile(params, "no text fits it")
        self._try_first_tokens(params, first, mask_np)
        return matcher

    def _try_first_tokens(
        self,
        params: StructuredOutputsParams,
        matcher: llguidance.LLMatcher,
        mask_np: np.ndarray,  # u8[num_mask_words * 4], of its first token
    ) -> None:
        """Some limits are reached behind the first tokens: an object may have many properties."""
        for _ in range(_NUM_TRIED_TOKENS):
            allowed = np.flatnonzero(np.unpackbits(mask_np, bitorder="little"))
            token_id = next((int(i) for i in allowed if int(i) not in self.eos_token_ids), None)
            if token_id is None:
                return
            matcher.consume_token(token_id)
            mask_np = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            if matcher.is_error():
                raise _cannot_compile(params, matcher.get_error())


def _key(params: StructuredOutputsParams) -> _Key:
    return (
        *(params.kind, params.source_text, params.disable_any_whitespace),
        *(params.whitespace_pattern, params.disable_additional_properties),
    )


def _grammar(params: StructuredOutputsParams) -> str:
    """The grammar in llguidance's own form.

    Raises:
        ValueError: It is malformed. (What llguidance itself finds wrong, the matcher tells.)
    """
    source = params.source_text
    options: dict[str, object] = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    match params.kind:
        case "json":
            # JSON Schema's other words for any value and for none; llguidance takes objects.
            if source.strip() == "true":
                source = "{}"
            elif source.strip() == "false":
                raise ValueError("no value fits the schema false")
            if params.disable_additional_properties:
                source = json.dumps(_without_more_properties(json.loads(source)))
            return llguidance.LLMatcher.grammar_from_json_schema(source, overrides=options)
        case "json_object":
            schema = '{"type": "object"}'
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        case "choice":
            return _choice_grammar(source)
        case "grammar":
            return f"{to_lark(source)}\n{NO_FORCING}"
    tag = json.loads(source)
    if params.disable_additional_properties:
        tag = _without_more_properties(tag)
    if isinstance(tag, Mapping) and "format" in tag:
        return StructuralFormat(options).grammar(tag["format"])
    return _structural_tag_grammar(tag, options)


def _without_more_properties(schema: object) -> object:
    """{"properties": {"a": {}}} -> the same with "additionalProperties": false, at any depth."""
    if isinstance(schema, list):
        return [_without_more_properties(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, object] = {}
    for name, part in schema.items():
        if name in _SCHEMAS_BY_NAME and isinstance(part, dict):
            closed[name] = {key: _without_more_properties(value) for key, value in part.items()}
        else:
            closed[name] = part if name in _VALUES else _without_more_properties(part)
    if isinstance(schema.get("properties"), dict) or "patternProperties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _choice_grammar(source: str) -> str:
    """'["a", "b"]' -> one token of the grammar; as rules, each choice is an item of every row."""
    choices = " | ".join(json.dumps(choice) for choice in json.loads(source))
    return f"start: CHOICE\nCHOICE: {choices}"


def _structural_tag_grammar(tag: object, schema_options: Mapping[str, object]) -> str:
    """{"triggers": ["<f"], "structures": [{"begin": "<f=a>", "schema": {}, "end": "</f>"}]}"""
    structures = tag.get("structures") if isinstance(tag, Mapping) else None
    triggers = tag.get("triggers") if isinstance(tag, Mapping) else None
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        raise ValueError('it must have "format", or "structures" and "triggers", two lists')
    tags = []
    for structure in structures:
        fields = structure if isinstance(structure, Mapping) else {}
        begin, end, schema = (fields.get(name) for name in ("begin", "end", "schema"))
        is_form = isinstance(begin, str) and isinstance(end, str) and isinstance(schema, Mapping)
        if not is_form:
            raise ValueError(
                'each structure must have "begin" and "end", two strings, and "schema", an object'
            )
        found = (t for t in triggers if isinstance(t, str) and t and begin.startswith(t))
        trigger = next(found, None)
        if trigger is None:
            raise ValueError(f"no trigger begins {begin[:80]!r}")
        bound = {**schema, "x-guidance": schema_options}
        tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=bound, end=end))
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def one_line(reason: str) -> str:
    """A reason of llguidance's, as it is shown."""
    return " ".join(reason.replace("<non-verbose/>", "").split())[:MAX_REASON_CHARS].rstrip(".")


def _cannot_compile(params: StructuredOutputsParams, reason: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"structured_outputs.{params.kind} cannot be compiled: {one_line(reason)}.",
        param="structured_outputs",
    )
