"""`LlguidanceProbe`: tries small schemas with llguidance, to find out what it can compile."""

import json
from collections.abc import Mapping, Sequence

import llguidance
import numpy as np

_TIGHT = {"whitespace_flexible": False}
# The beginning of llguidance's error for a schema that it understands, but that no value fits.
_NO_VALUE = "Unsatisfiable schema"


class LlguidanceProbe:
    """A `SchemaProbe`.

    Args:
        tokenizer: The model's tokenizer.
        limits: Limits on one grammar.
    """

    def __init__(
        self, tokenizer: llguidance.LLTokenizer, limits: llguidance.LLParserLimits
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits

    def compiles(self, schema: Mapping[str, object]) -> bool:
        """Whether llguidance can compile a schema, even if no value fits it."""
        error = _error_of(schema)
        return not error or self.is_about_values(error)

    def error_of(self, schema: Mapping[str, object]) -> str:
        """llguidance's error for a schema; empty if there is none."""
        return _error_of(schema)

    def is_about_values(self, error: str) -> bool:
        """Whether the error says that llguidance understands the schema, but no value fits it."""
        return _NO_VALUE in error

    def matches(self, pattern: str, text: str) -> bool:
        """Whether a pattern of JSON Schema matches anywhere in a text."""
        return not _error_of({"type": "string", "pattern": pattern, "enum": [text]})

    def has_more_names(self, pattern: str, names: Sequence[str]) -> bool:
        """Whether a pattern matches names that are not in `names`."""
        schema = {
            "type": "object",
            "properties": dict.fromkeys(names, False),
            "patternProperties": {pattern: True},
            "additionalProperties": False,
            "minProperties": 1,
        }
        grammar = _grammar_of(schema)
        matcher = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            # Other errors appear again when the whole schema is compiled.
            return _NO_VALUE not in matcher.get_error()
        matcher.consume_tokens(self._tokenizer.greedy_tokenize("{"))
        mask_np = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        return bool(mask_np.any()) and not matcher.is_error()


def _error_of(schema: Mapping[str, object]) -> str:
    return llguidance.LLMatcher.validate_grammar(_grammar_of(schema))


def _grammar_of(schema: Mapping[str, object]) -> str:
    return llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_TIGHT)
