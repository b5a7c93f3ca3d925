"""Rewrites errors of llguidance for clients that do not know llguidance."""

import re

from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.contracts.engine_output import NO_TOKEN_LEFT
from paxkv.structured_output.grammar_syntax import NO_FORCING

# The client gets the reason, which may quote its grammar.
MAX_REASON_CHARS = 400
_NO_VALUE_FITS = "nothing can follow the text so far: no value fits at this place"
_TOO_LARGE = "it is too large, or repeats too much; send a simpler one"
# Phrases in llguidance's errors -> phrases for a client.
_PLAIN_WORDS = {
    "<non-verbose/>": "",
    "Unsatisfiable schema": "no value fits the schema",
    "is not present in a registry and retrieving it failed: Default retriever does not fetch "
    "resources": "is another document, which paxkv does not fetch; put its schema into $defs",
    "NoExtensionBias": _NO_VALUE_FITS,
    "lexer error: too many expressions constructed": _TOO_LARGE,
}
_TOO_DEEP = re.compile(r"recursion limit exceeded at line \d+ column \d+")
# The lines of the grammar around a mistake, and the place of the mistake in them:
#    1 | start: b
#               ^
_EXCERPT = re.compile(r"\n +\d+ \| [^\n]*(?:\n *\^)?")
_NO_FORCING_LINE = re.compile(rf"\n +\d+ \| {re.escape(NO_FORCING)}")
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
# Phrase in a reason -> what a client can do. The first phrase that is found counts.
_REMEDIES = {
    _NO_VALUE_FITS: "change the format so that every beginning of an answer can be completed",
    "doesn't satisfy the grammar": "this is a bug in paxkv: please report it with the format",
    "; max is ": "send a simpler format",
    "limit": "send a simpler format",
}


def one_line(reason: str) -> str:
    """Rewrites a reason of llguidance as one line for clients."""
    for words, plain_words in _PLAIN_WORDS.items():
        reason = reason.replace(words, plain_words)
    reason = _NO_FORCING_LINE.sub("", reason)
    reason = _TOO_DEEP.sub("it is nested too deeply", reason)
    return " ".join(reason.split())[:MAX_REASON_CHARS].rstrip(".")


def without_excerpt(reason: str) -> str:
    """Removes lines of the grammar from a reason. Only clients that send Lark know these lines.

    'at 1(8): unknown name: "b"\n   1 | start: b\n              ^\n' -> 'unknown name: "b"'
    """
    return _PLACE.sub("", _EXCERPT.sub("", reason))


def describe_failure(params: StructuredOutputsParams, reason: str, *, num_tokens: int) -> str:
    """The error for an answer that cannot be continued.

    Args:
        reason: llguidance's error, or `NO_TOKEN_LEFT`.
        num_tokens: Tokens of the answer so far.
    """
    shown = reason if reason == NO_TOKEN_LEFT else one_line(reason)
    remedy = next((what for words, what in _REMEDIES.items() if words in shown), None)
    ending = "" if reason == NO_TOKEN_LEFT or remedy is None else f"; {remedy}"
    return (
        f"the grammar of {params.field_of()} cannot go on after {num_tokens} tokens: "
        f"{shown}{ending}."
    )
