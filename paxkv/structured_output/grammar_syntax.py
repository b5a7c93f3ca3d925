"""Converts grammars in GBNF to Lark's syntax, which llguidance reads."""

import re
import sys

from llguidance.gbnf_to_lark import gbnf_to_lark

# Without this option, llguidance searches for the end of the text that must follow. With
# `start: A "x"` and `A: /x+/` there is no end, so the search could hang a step.
# llguidance ignores the option in nested grammars.
NO_FORCING = '%llguidance {"no_forcing": true}'
# root ::= "a" | other-rule
_GBNF_RULE = re.compile(r"(?m)^[ \t]*[\w-]+[ \t]*::=")
# Comments, literals and character classes, of which the latter two may contain escapes.
_GBNF_TEXT = re.compile(r'#[^\r\n]*|"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', re.DOTALL)
# Includes escaped punctuation, because a class may contain "\-".
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([^\w\s\"\\\[\]])|.)", re.DOTALL
)
# Lark allows control characters in classes, but not in literals.
_ESCAPE_OR_CONTROL = re.compile(r"\\.|([\x00-\x1f\x7f])", re.DOTALL)


def to_lark(source: str) -> str:
    """Converts a grammar to Lark. A text without a rule of GBNF is Lark already.

    Raises:
        ValueError: The text is malformed GBNF.
    """
    if _GBNF_RULE.search(source) is None:
        return source
    try:
        return gbnf_to_lark(_GBNF_TEXT.sub(_with_known_escapes, source))
    # The converter raises many types of errors, such as its own, IndexError and RecursionError.
    except Exception as error:
        raise ValueError(f"as GBNF: {error}") from None


def _with_known_escapes(text: re.Match[str]) -> str:
    """[\\u00e9\\-] -> [é\\x2d], "a\\x1b" -> ("a" [\\x1b] ""): the converter knows few escapes."""
    whole = text.group()
    if whole.startswith("#"):
        return whole
    if whole.startswith("["):
        return _ESCAPE.sub(_in_class, whole)
    literal = _ESCAPE.sub(_in_literal, whole)
    pieces = _ESCAPE_OR_CONTROL.sub(_outside_of_literal, literal)
    # In parentheses, because a repetition applies to the whole literal.
    return literal if pieces == literal else f"({pieces})"


def _in_class(escape: re.Match[str]) -> str:
    char = _character(escape)
    if char is None:
        return escape.group()
    return char if ord(char) >= 0x80 else f"\\x{ord(char):02x}"


def _in_literal(escape: re.Match[str]) -> str:
    char = _character(escape)
    if char is None:
        return escape.group()
    return f"\\{char}" if char in '"\\' else char


def _outside_of_literal(char: re.Match[str]) -> str:
    return char.group() if char[1] is None else f'" [\\x{ord(char[1]):02x}] "'


def _character(escape: re.Match[str]) -> str | None:
    """The character of an escape; None for escapes that the converter knows.

    Raises:
        ValueError: The escape is half a surrogate pair, or beyond Unicode.
    """
    *codes, punctuation = escape.groups()
    code = next(filter(None, codes), None)
    if code is None:
        return punctuation
    if 0xD800 <= int(code, 16) < 0xE000:
        raise ValueError(f"U+{code.upper()} is half a character; write the whole character.")
    if int(code, 16) > sys.maxunicode:
        raise ValueError(f"U+{code.upper()} does not exist; the last one is U+{sys.maxunicode:X}.")
    return chr(int(code, 16))
