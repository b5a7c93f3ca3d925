"""The two syntaxes are distinguished, and escapes of GBNF are read."""

import pytest

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.structured_output.grammar_syntax import to_lark
from tests.paxkv.structured_output.demo_grammars import TOKENIZER, make_compiler

COMPILER = make_compiler()
FITTING = {
    "rules that may be left out of a tree": ('?start: x "b"\n?x: "a"', "ab"),
    "rules that are kept": ('!start: "a"', "a"),
    "another rule first": ('x: "a"\nstart: x "b"', "ab"),
    "what GBNF has, as text": ('start: "a ::= b" // c ::= d\n// e ::= f', "a ::= b"),
    "a comment at the end": ('start: "a" // no more', "a"),
    "white space": ('  root   ::=\n  "a" | "b"\r\n', "b"),
    "what Lark has, as text": ('# start: "b"\nroot ::= "start: "', "start: "),
    "characters by number": (r'root ::= "\x41\u00e9\U0001F600\x22\x5c" [\u00e9\x5d]+', 'Aé😀"\\]é'),
    "characters by number, twice": (r'root ::= "\\x41"', r"\x41"),
    "lines": (r'root ::= "\x0a\n" [\x0a\t]', "\n\n\t"),
    "control characters": (
        r'root ::= "\x1b[0m\x00"{2} "\x08\u000c" "\U0000007f" [\x01] "\"\x1f"',
        '\x1b[0m\0\x1b[0m\0\b\f\x7f\x01"\x1f',
    ),
    "control characters as they are": ('root ::= "a\nb\x1b"+', "a\nb\x1ba\nb\x1b"),
    "a hyphen": (r'root ::= [a\-z]+ "\-"', "a-z-"),
    "a roof": (r"root ::= [\^a]+", "^a"),
    "brackets": (r'root ::= "]" [\[\]]+', "][]"),
    "JSON's characters": (r'root ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" ["\\nrt])* "\""', r'"a\"\n"'),
    "a comment": ('root ::= "a" # "\\x41" [\nx ::= "b"', "a"),
}


def _fits(grammar: str, text: str) -> bool:
    matcher = COMPILER.compile(StructuredOutputsParams(grammar=grammar))
    return matcher.consume_tokens(TOKENIZER.encode(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", FITTING)
def test_a_grammar_accepts_its_text(name):
    assert _fits(*FITTING[name])


def test_a_class_with_an_escaped_hyphen_has_no_range():
    assert not _fits(r"root ::= [a\-z]", "b")


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start ::= "a"', "No 'root' rule"),
        (r"root ::= [\d]", "Invalid escape"),
        ('root ::= "a\\', "GBNF"),
        (r'root ::= "\U00110000"', r"U\+00110000 does not exist"),
        (r"root ::= [\UFFFFFFFF]", r"U\+FFFFFFFF does not exist"),
        (r"root ::= [\ud800-\udfff]", r"U\+D800 is half a character"),
        ('root ::= "a', "Unexpected end"),
        ('root ::= "\\\t"', "Invalid escape"),
    ],
)
def test_malformed_gbnf_is_refused_with_the_reason(grammar, reason):
    with pytest.raises(ValueError, match=reason):
        to_lark(grammar)
