"""`StructuredOutputsParams`: the format that a request's output must have."""

import dataclasses
import json
from typing import Literal

from paxkv.errors import InvalidRequestError

MAX_CHOICES = 10_000
# Reading a grammar of this length takes milliseconds. Its compiled size is limited elsewhere.
MAX_GRAMMAR_CHARS = 256 * 1024
MAX_WHITESPACE_CHARS = 256
# Grammars cannot enforce some keywords of JSON schemas. They are ignored by default. A schema with
# this keyword set to true is rejected instead; the keyword also applies to subschemas.
STRICT_KEYWORD = "x-paxkv-strict"
# Prefix of the `$id` of a tool's arguments in the schema of a list of calls. Reports of ignored
# keywords use this `$id`.
TOOL_ID_PREFIX = "tool:"
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_THOUGHTS = ("none", "maybe", "begun")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FormField:
    """The request field that contained a grammar, for error messages.

    Args:
        name: The field's name in the client's API, such as "tools[3].input_schema".
        tool: The name of the tool whose arguments the field describes.
    """

    name: str
    tool: str | None = None

    def __str__(self) -> str:
        return self.name if self.tool is None else f'{self.name} (tool "{self.tool}")'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """A grammar of one of several kinds, with vLLM's field names.

    Args:
        json: A JSON schema, as an object or as text.
        regex: A regular expression that the whole output must match.
        choice: Strings, one of which must be the output.
        grammar: A context-free grammar in Lark or GBNF syntax.
        json_object: True requires any JSON object.
        structural_tag: A structural tag as JSON text. The output is free text until a trigger, and
            then must match the schema of the tag that the trigger starts.
        disable_any_whitespace: Forbid white space between the parts of JSON.
        whitespace_pattern: A regular expression for the white space between the parts of JSON. If
            left out, one space, or a new line with at most 20 characters of indentation, is
            allowed.
        disable_additional_properties: Forbid further properties in objects whose schema lists
            properties, unless the schema itself specifies them.
        sent_in: The request field that contained the grammar. For a list of calls, the fields of
            the tools follow it. Empty means `structured_outputs`. Used only in error messages.
        thoughts: The text before the grammar applies. "none": no text. "maybe": thoughts between
            `<think>` and `</think>`, if the first token is `<think>`. "begun": thoughts that the
            prompt has opened.

    Raises:
        InvalidRequestError: Not exactly one kind is set, or a value has the wrong type.
    """

    json: str | dict[str, object] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    disable_additional_properties: bool = False
    thoughts: Literal["none", "maybe", "begun"] = "none"
    sent_in: tuple[FormField, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        asked = [name for name in _KINDS if self._is_asked(name)]
        if len(asked) != 1:
            raise _error(
                f"structured_outputs must have one of {', '.join(_KINDS)}, got "
                f"{' and '.join(asked) or 'none'}."
            )
        for name in ("regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _error(
                    f"structured_outputs.{name} must be a non-empty string, got {_shown(value)}."
                )
        if self.json is not None and not isinstance(self.json, (str, dict)):
            raise _error(
                "structured_outputs.json must be a JSON schema, as an object or as JSON text, got "
                f"{_shown(self.json)}."
            )
        self._check_choice()
        for name in ("json_object", "disable_any_whitespace", "disable_additional_properties"):
            value = getattr(self, name)
            if not isinstance(value, bool) and (name, value) != ("json_object", None):
                raise _error(
                    f"structured_outputs.{name} must be true or false, got {_shown(value)}."
                )
        self._check_whitespace()
        if self.thoughts not in _THOUGHTS:
            raise _error(
                f"structured_outputs.thoughts must be one of {', '.join(_THOUGHTS)}, got "
                f"{_shown(self.thoughts)}."
            )
        self._check_is_unicode()
        num_chars = len(self.source_text)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise InvalidRequestError(
                f"{self.field_of()} has {num_chars} characters; at most {MAX_GRAMMAR_CHARS} can be "
                "compiled. Send a smaller one.",
                param=self.field_of().name,
            )

    def field_of(self, tool: str | None = None) -> FormField:
        """The request field of `tool` if `sent_in` has it, or the field of the whole grammar."""
        if not self.sent_in:
            return FormField(name=f"structured_outputs.{self.kind}")
        found = (field for field in self.sent_in if tool is not None and field.tool == tool)
        return next(found, self.sent_in[0])

    @property
    def kind(self) -> str:
        """The name of the field that is set."""
        return next(name for name in _KINDS if self._is_asked(name))

    @property
    def source_text(self) -> str:
        """The grammar as text; schemas and choices as JSON."""
        value = getattr(self, self.kind)
        if isinstance(value, str):
            return value
        try:
            return json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _error(f"{self.field_of()} is not JSON: {error}.") from None

    def _check_is_unicode(self) -> None:
        """Rejects lone surrogates: they are not characters, and cannot be sent to the engine."""
        try:
            self.source_text.encode("utf-8")
        except UnicodeEncodeError as error:
            field = self.field_of()
            raise InvalidRequestError(
                f"{field} is not valid Unicode: it has a lone surrogate, "
                f"{error.object[error.start]!a}; send whole characters.",
                param=field.name,
            ) from None

    def _check_whitespace(self) -> None:
        pattern = self.whitespace_pattern
        if pattern is None:
            return
        if not isinstance(pattern, str) or not 0 < len(pattern) <= MAX_WHITESPACE_CHARS:
            raise _error(
                "structured_outputs.whitespace_pattern must be a regular expression of at most "
                f"{MAX_WHITESPACE_CHARS} characters, got {_shown(pattern)}."
            )
        if self.disable_any_whitespace:
            raise _error(
                "structured_outputs has both disable_any_whitespace and whitespace_pattern; send "
                "only one of them."
            )

    def _is_asked(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        is_list = isinstance(self.choice, (list, tuple)) and self.choice
        if not is_list or not all(isinstance(c, str) and c for c in self.choice):
            raise _error(
                "structured_outputs.choice must be a list of non-empty strings, got "
                f"{_shown(self.choice)}."
            )
        if len(self.choice) > MAX_CHOICES:
            raise _error(
                f"structured_outputs.choice has {len(self.choice)} strings; at most {MAX_CHOICES} "
                "are allowed. Send fewer."
            )


def _shown(value: object) -> str:
    return f"{value!r:.80}"


def _error(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")
