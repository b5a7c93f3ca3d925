"""`GrammarCompiler`: compiles the form of a request to a matcher of llguidance, within limits."""

import dataclasses
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence

import llguidance
import numpy as np

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import UnsupportedFeatureError
from paxkv.structured_output.form_errors import FormError, SchemaError
from paxkv.structured_output.grammar_syntax import NO_FORCING, to_lark
from paxkv.structured_output.grammar_tokenizer import make_grammar_tokenizer
from paxkv.structured_output.grammar_walk import find_dead_end
from paxkv.structured_output.json_schema.schema_cleaner import SchemaCleaner
from paxkv.structured_output.json_schema.schema_faults import find_fault
from paxkv.structured_output.json_schema.schema_probe import LlguidanceProbe
from paxkv.structured_output.plain_reasons import one_line, without_excerpt
from paxkv.structured_output.structural_format import StructuralFormat
from paxkv.structured_output.thoughts import ThoughtTokens, find_thought_tokens
from paxkv.structured_output.token_texts import TokenTexts

# Some applications send the same few schemas with every request.
MAX_CACHED_GRAMMARS = 64
# White space between the parts of JSON: a space, or a new line with its indentation. If more were
# allowed, a small model might never stop writing white space.
_WHITESPACE = r"[ \t]|[ \t]?\r?\n[ \t]{0,20}"
# Keywords that map names to schemas, and keywords whose values are not schemas.
_SCHEMAS_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_VALUES = ("const", "enum")
_SHOWN_CHARS = 80
# The content of a form: kind, source and options.
FormKey = tuple[str, str, bool, str | None, bool]
# Limits on one grammar: about 0.1 s and 50 MB to build it, and 0.05 s per step. Ordinary schemas
# need far less.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=500_000,
    step_lexer_fuel=200_000,
    step_max_items=25_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)


@dataclasses.dataclass(frozen=True, slots=True)
class _Compiled:
    """A matcher before its first token, and the keywords of schemas that it ignores."""

    matcher: llguidance.LLMatcher
    ignored_keywords: tuple[str, ...]


class GrammarCompiler:
    """Compiles for one model. Thread-safe; several threads can compile at the same time.

    Args:
        tokenizer_json: The content of the model's tokenizer.json.
        vocab_size: Size of the model's vocabulary, which may exceed the tokenizer's.
        eos_token_ids: At least one token that ends an answer.
        thought_token_ids: The tokens `<think>` and `</think>`; None if the model has none.
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
        # Made for the first grammar, because a large vocabulary takes a second or two.
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._thought_token_ids = thought_token_ids
        self._token_texts: TokenTexts | None = None
        self._thought_tokens: ThoughtTokens | None = None
        self._lock = threading.Lock()
        # The most recently used one is last. Its matcher is copied for each request.
        self._compiled: OrderedDict[FormKey, _Compiled] = OrderedDict()

    @property
    def num_mask_words(self) -> int:
        """Words of 32 bits in the mask of one request."""
        return (self.vocab_size + 31) // 32

    def check(self, params: StructuredOutputsParams) -> tuple[str, ...]:
        """Compiles a form. Returns the places of schema keywords that the grammar ignores.

        Raises:
            InvalidRequestError: As in `compile`.
        """
        return self._compile(params).ignored_keywords

    def compile(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        """Returns a matcher before its first token.

        Raises:
            InvalidRequestError: The form cannot be compiled within the limits.
        """
        return self._compile(params).matcher.deep_copy()

    def _compile(self, params: StructuredOutputsParams) -> _Compiled:
        if params.thoughts != "none":
            self.thought_tokens()
        key = form_key(params)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            compiled = self._compile_new(params)
            with self._lock:
                self._compiled[key] = compiled
                if len(self._compiled) > MAX_CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return compiled

    def is_cached(self, params: StructuredOutputsParams) -> bool:
        """Whether the form is compiled already, so that `compile` returns immediately."""
        with self._lock:
            return form_key(params) in self._compiled

    def token_texts(self) -> TokenTexts:
        """The model's tokens as bytes; the first call takes a while."""
        tokenizer = self._get_tokenizer()
        with self._lock:
            if self._token_texts is None:
                self._token_texts = TokenTexts(tokenizer)
            return self._token_texts

    def thought_tokens(self) -> ThoughtTokens:
        """The tokens that begin and end thoughts, with masks for the tokens between them.

        Raises:
            UnsupportedFeatureError: The model has no such tokens.
        """
        if self._thought_token_ids is None:
            raise UnsupportedFeatureError(
                "thoughts before structured output need a model with the tokens <think> and "
                "</think>, which this model does not have.",
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

    def _compile_new(self, params: StructuredOutputsParams) -> _Compiled:
        """Compiles a form after removing keywords of its schemas that no grammar can enforce.

        If llguidance refuses it, a second pass also removes keywords that it cannot compile.
        """
        probe = LlguidanceProbe(self._get_tokenizer(), LIMITS)
        first_refusal: FormError | None = None
        for probes_values in (False, True):
            cleaner = SchemaCleaner(probe, probes_values=probes_values)
            try:
                return _Compiled(self._make_matcher(params, cleaner), cleaner.ignored)
            except FormError as refusal:
                first_refusal = first_refusal or refusal
                if cleaner.num_schemas == 0 or cleaner.is_strict_refusal:
                    raise
        # Removing keywords did not help, so the first refusal names the cause.
        raise _refusal_with_place(params, probe) or first_refusal

    def _make_matcher(
        self, params: StructuredOutputsParams, cleaner: SchemaCleaner
    ) -> llguidance.LLMatcher:
        try:
            grammar = _grammar(params, cleaner)
        except RecursionError:
            raise _cannot_compile(params, "it is nested too deeply") from None
        except SchemaError as error:
            raise _cannot_compile(params, str(error), tool=error.tool) from None
        except ValueError as error:
            raise _cannot_compile(params, str(error)) from None
        matcher = llguidance.LLMatcher(self._get_tokenizer(), grammar, log_level=0, limits=LIMITS)
        if matcher.is_error():
            error = matcher.get_error()
            is_own = params.kind == "grammar"
            raise _cannot_compile(params, error if is_own else without_excerpt(error))
        # The cost of a grammar shows in the first masks. If the first mask reaches a limit, only
        # the second one reports it.
        for _ in range(2):
            first = matcher.deep_copy()
            mask_np = np.frombuffer(first.compute_bitmask(), np.uint8)
            if first.is_error():
                raise _cannot_compile(params, first.get_error())
        if not mask_np.any():
            raise _cannot_compile(params, "no text fits it")
        dead_end = find_dead_end(
            matcher,
            self._get_tokenizer(),
            eos_token_ids=self.eos_token_ids,
            is_json=cleaner.num_schemas > 0,
        )
        if dead_end is not None:
            raise _cannot_compile(params, dead_end)
        return matcher


def form_key(params: StructuredOutputsParams) -> FormKey:
    """Everything that the grammar depends on: equal keys have equal grammars."""
    return (
        *(params.kind, params.source_text, params.disable_any_whitespace),
        *(params.whitespace_pattern, params.disable_additional_properties),
    )


def _grammar(params: StructuredOutputsParams, cleaner: "SchemaCleaner | _SchemaCollector") -> str:
    """Converts a form to a grammar for llguidance.

    Args:
        cleaner: Cleans the schemas in the form.

    Raises:
        ValueError: The form is malformed. (The matcher reports mistakes that llguidance finds.)
    """
    source = params.source_text
    options: dict[str, object] = {"whitespace_pattern": params.whitespace_pattern or _WHITESPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    match params.kind:
        case "json":
            schema = _parsed(source, "a JSON schema")
            if params.disable_additional_properties:
                schema = _without_more_properties(schema)
            return _json_grammar(cleaner.clean(schema), options)
        case "json_object":
            return _json_grammar(cleaner.clean({"type": "object"}), options)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(source)
        case "choice":
            return _choice_grammar(source)
        case "grammar":
            return f"{to_lark(source)}\n{NO_FORCING}"
    tag = _parsed(source, "a structural tag")
    if params.disable_additional_properties:
        tag = _without_more_properties(tag)
    if isinstance(tag, Mapping) and "format" in tag:
        return StructuralFormat(options, cleaner).grammar(tag["format"])
    return _structural_tag_grammar(tag, options, cleaner)


def _parsed(source: str, wanted: str) -> object:
    try:
        return json.loads(source)
    except ValueError as error:
        raise ValueError(
            f"it is not JSON ({error}), got {source[:_SHOWN_CHARS]!r}; send {wanted} as JSON"
        ) from None


def _json_grammar(schema: object, options: Mapping[str, object]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options)


def _without_more_properties(schema: object) -> object:
    """Adds "additionalProperties": false to schemas with named properties, at any depth."""
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
    """Makes one terminal of all choices: a rule per choice would add an item to each parser row."""
    choices = " | ".join(json.dumps(choice) for choice in json.loads(source))
    return f"start: CHOICE\nCHOICE: {choices}"


def _structural_tag_grammar(
    tag: object, schema_options: Mapping[str, object], cleaner: SchemaCleaner
) -> str:
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
        bound = {**cleaner.clean(schema), "x-guidance": schema_options}
        tags.append(llguidance.StructTag(trigger=trigger, begin=begin, grammar=bound, end=end))
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


def _cannot_compile(
    params: StructuredOutputsParams, reason: str, *, tool: str | None = None
) -> FormError:
    return FormError(params, f"cannot be compiled: {one_line(reason)}.", tool=tool)


class _SchemaCollector:
    """Replaces a `SchemaCleaner`, and collects the schemas of a form as they were sent."""

    def __init__(self) -> None:
        self.schemas: list[object] = []

    def clean(self, schema: object) -> object:
        self.schemas.append(schema)
        return {}


def _refusal_with_place(
    params: StructuredOutputsParams, probe: LlguidanceProbe
) -> FormError | None:
    """The error for a form that was refused, with the place of the mistake; None if not found."""
    pattern = params.whitespace_pattern
    if pattern is not None:
        error = llguidance.LLMatcher.validate_grammar(
            llguidance.LLMatcher.grammar_from_regex(pattern)
        )
        if error:
            return _cannot_compile(params, f"whitespace_pattern: {without_excerpt(error)}")
    collector = _SchemaCollector()
    try:
        _grammar(params, collector)
        faults = [find_fault(schema, probe) for schema in collector.schemas]
    except (RecursionError, ValueError):
        return None
    fault = next((fault for fault in faults if fault is not None), None)
    return None if fault is None else _cannot_compile(params, str(fault), tool=fault.tool)
