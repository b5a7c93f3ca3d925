"""`StructuralFormat`: converts the `format` of a structural tag to a grammar.

Source: the structural tags of XGrammar, with the same names. Free text ends at the first place
where the next part may begin, like llguidance's lazy lexemes.
"""

import json
from collections.abc import Callable, Mapping, Sequence

import llguidance

from paxkv.structured_output.grammar_syntax import NO_FORCING, to_lark
from paxkv.structured_output.json_schema.schema_cleaner import SchemaCleaner

_ANY_TEXT = "/(?s:.*)/"
# Deeper than any useful format, but within the limit on recursion.
_MAX_DEPTH = 32
_Format = Mapping[str, object]


class StructuralFormat:
    """Reads one format.

    Args:
        schema_options: llguidance's options for JSON schemas.
        cleaner: Cleans the schemas in the format.
    """

    def __init__(self, schema_options: Mapping[str, object], cleaner: SchemaCleaner) -> None:
        self._schema_options = schema_options
        self._cleaner = cleaner
        self._rules: list[str] = []
        self._readers: dict[str, Callable[[_Format, Sequence[str], int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag,
            "triggered_tags": self._triggered_tags,
            "tags_with_separator": self._tags_with_separator,
        }

    def grammar(self, form: object) -> str:
        """The whole grammar, in Lark's syntax.

        Raises:
            ValueError: The format is malformed, or cannot be expressed.
        """
        start = self._read(form, (), 0)
        return "\n".join([NO_FORCING, f"start: {start}", *self._rules])

    def _read(self, form: object, ends: Sequence[str], depth: int) -> str:
        """The expression for `form`, followed by one of `ends` if there are any."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if not isinstance(kind, str) or kind not in self._readers:
            shown = json.dumps(kind, default=str)[:40]
            raise ValueError(
                f"a format's type must be one of {', '.join(self._readers)}, got {shown}"
            )
        if depth > _MAX_DEPTH:
            raise ValueError(f"formats may be nested at most {_MAX_DEPTH} levels deep")
        return self._readers[kind](form, ends, depth)

    def _const_string(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        return _joined(_literal(_text(form, "value")), _alternatives(ends))

    def _json_schema(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        schema = form.get("json_schema")
        if not isinstance(schema, Mapping | bool):
            raise ValueError('a format "json_schema" must have "json_schema", an object')
        schema = {**self._cleaner.clean(schema), "x-guidance": self._schema_options}
        return _joined(f"%json {json.dumps(schema)}", _alternatives(ends))

    def _regex(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        pattern = f"/{llguidance.regex_to_lark(_text(form, 'pattern'))}/"
        # The pattern and the end are one lexeme. Alone, the pattern may also match the end, and so
        # consume it.
        return self._rule(_joined(pattern, _alternatives(ends)), is_terminal=True)

    def _grammar(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        source = to_lark(_text(form, "grammar"))
        return _joined(self._rule(f"%lark {{\n{source}\n}}"), _alternatives(ends))

    def _any_text(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        _refuse_others(form, ("type",))
        return self._text_until(ends) if ends else self._rest()

    def _sequence(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        *elements, last = _list(form, "elements")
        if any(map(_is_unlimited, elements)):
            raise ValueError('text of any length may only be the last of the "elements"')
        parts = [self._read(element, (), depth + 1) for element in elements]
        return _joined(*parts, self._read(last, ends, depth + 1))

    def _or(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        elements = _list(form, "elements")
        return _any_of([self._read(element, ends, depth + 1) for element in elements])

    def _tag(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        begin, content = self._tag_parts(form, depth)
        return _joined(_literal(begin), content, _alternatives(ends))

    def _triggered_tags(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        """Free text, in which one of a trigger's tags follows each occurrence of the trigger."""
        triggers = _list(form, "triggers")
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise ValueError('"triggers" must be strings that are not empty')
        at_least_one, is_single = _flag(form, "at_least_one"), _flag(form, "stop_after_first")
        behind: dict[str, list[str]] = {}
        whole = []
        for tag in _list(form, "tags"):
            begin, content = self._tag_parts(tag, depth)
            trigger = next((t for t in triggers if begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"no trigger begins {begin[:80]!r}")
            behind.setdefault(trigger, []).append(_joined(_literal(begin[len(trigger) :]), content))
            whole.append(_joined(_literal(begin), content))
        triggered = self._rule(
            _any_of(
                [
                    _joined(self._text_until([trigger]), _any_of(parts))
                    for trigger, parts in behind.items()
                ]
            )
        )
        rest = self._text_until(ends) if ends else self._rest()
        if is_single:
            first = whole if at_least_one else [triggered]
            ended = _joined(_any_of(first), _alternatives(ends))
            return ended if at_least_one else _any_of([ended, rest])
        return _joined(_any_of(whole) if at_least_one else "", f"{triggered}*", rest)

    def _tags_with_separator(self, form: _Format, ends: Sequence[str], depth: int) -> str:
        parts = [self._tag_parts(tag, depth) for tag in _list(form, "tags")]
        tag = self._rule(_any_of([_joined(_literal(begin), content) for begin, content in parts]))
        separator = _literal(_text(form, "separator", may_be_empty=True))
        more = "" if _flag(form, "stop_after_first") else f"({_joined(separator, tag)})*"
        tags = _joined(tag, more)
        if not _flag(form, "at_least_one"):
            tags = f"({tags})?"
        return _joined(tags, _alternatives(ends))

    def _tag_parts(self, tag: object, depth: int) -> tuple[str, str]:
        """The beginning of a tag, and the expression for the rest, including its end."""
        if not isinstance(tag, Mapping):
            raise ValueError('each tag must be an object with "begin", "content" and "end"')
        end = tag.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not all(isinstance(e, str) for e in ends):
            raise ValueError('the "end" of a tag must be a string, or a list of them')
        ends = [e for e in ends if e]
        if not ends and _is_unlimited(tag.get("content")):
            raise ValueError('a tag with text of any length in it needs an "end"')
        begin = _text(tag, "begin", may_be_empty=True)
        return begin, self._read(tag.get("content"), ends, depth + 1)

    def _text_until(self, ends: Sequence[str]) -> str:
        """Any text up to the first of `ends`, including it."""
        return self._rule(_joined(_ANY_TEXT, _alternatives(ends)), is_lazy=True)

    def _rest(self) -> str:
        """Any text up to the end of the answer."""
        return self._rule(_ANY_TEXT, is_terminal=True)

    def _rule(self, body: str, *, is_terminal: bool = False, is_lazy: bool = False) -> str:
        """Adds a rule and returns its name. Lark's terminals have names in capital letters."""
        name = f"{'T' if is_terminal else 'r'}{len(self._rules)}"
        self._rules.append(f"{name}{'[lazy]' if is_lazy else ''}: {body}")
        return name


def _is_unlimited(form: object) -> bool:
    """Whether a format is text of any length, or ends with it."""
    kind = form.get("type") if isinstance(form, Mapping) else None
    elements = form.get("elements") if kind in ("sequence", "or") else None
    if isinstance(elements, list) and elements:
        return any(map(_is_unlimited, elements if kind == "or" else elements[-1:]))
    return kind in ("any_text", "triggered_tags")


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _joined(*parts: str) -> str:
    """The parts in sequence; the empty text if there are none."""
    return " ".join(part for part in parts if part) or '""'


def _any_of(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"({' | '.join(parts)})"


def _alternatives(texts: Sequence[str]) -> str:
    return _any_of([_literal(text) for text in texts]) if texts else ""


def _text(form: _Format, name: str, *, may_be_empty: bool = False) -> str:
    value = form.get(name)
    if not isinstance(value, str) or not (value or may_be_empty):
        kind = "a string" if may_be_empty else "a string that is not empty"
        raise ValueError(f'{form.get("type", "tag")}: "{name}" must be {kind}')
    return value


def _list(form: _Format, name: str) -> list[object]:
    value = form.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f'{form.get("type")}: "{name}" must be a list that is not empty')
    return value


def _flag(form: _Format, name: str) -> bool:
    value = form.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f'{form.get("type")}: "{name}" must be true or false')
    return value


def _refuse_others(form: _Format, known: Sequence[str]) -> None:
    others = sorted(name for name, value in form.items() if name not in known and value)
    if others:
        raise ValueError(f"{form.get('type')}: {', '.join(others)} is not supported")
