"""Parses command lines: a model without a flag, vLLM's flags, config files, misspelled flags."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from paxkv.config.command_line import JSON_LIST
from paxkv.entrypoints.cli.config_file import read_config_file
from paxkv.entrypoints.cli.flag_spelling import plain_words
from paxkv.entrypoints.cli.vllm_flags import add_vllm_flags, drain_warnings
from paxkv.errors import ConfigError

# argparse has no public list of its flags, so this module reads `_option_string_actions`.
_CONFIG_FILE, _MODEL_WORD = "config_file", "model_word"
# A word with more edits is not a typing error. Shorter prefixes match too many flags.
_MAX_EDITS, _MIN_PREFIX = 3, 8


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model word, --config and vLLM's flags. Call it after the flags of settings."""
    parser.add_argument(_MODEL_WORD, nargs="?", metavar="MODEL", help="the same as --model MODEL")
    parser.add_argument(
        "--config",
        dest=_CONFIG_FILE,
        type=Path,
        metavar="FILE",
        help="read flags from a .yaml, .toml or .json file, as in `max-num-seqs: 32`; flags of the "
        "command line take precedence",
    )
    add_vllm_flags(parser)


def parse_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None
) -> argparse.Namespace:
    """Parses a command line. A mistake ends the program, as in argparse.

    The error for an unknown flag suggests the nearest known flag. It does not repeat the flag's
    value, which may be a secret key.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    namespace = _parse(parser, arguments, argparse.Namespace())
    path = getattr(namespace, _CONFIG_FILE, None)
    if path is not None:
        try:
            words = read_config_file(
                path,
                json_flags=_json_flags(parser),
                single_flags=_single_flags(parser),
                known_flags=parser._option_string_actions,
            )
        except ConfigError as error:
            parser.error(str(error))
        # Values in the namespace are not reset to defaults, so the command line overrides the file.
        from_file = _parse(parser, words, argparse.Namespace())
        namespace = _parse(parser, arguments, from_file)
    model = vars(namespace).pop(_MODEL_WORD, None)
    if model is not None:
        is_flag_given = any(a == "--model" or a.startswith("--model=") for a in arguments)
        if is_flag_given and namespace.model != model:
            parser.error(f"two models: {model!r}, and --model {namespace.model!r}. Choose one.")
        namespace.model = model
    for warning in drain_warnings(namespace, parser):
        print("paxkv: warning:", warning, file=sys.stderr)
    return namespace


def _parse(
    parser: argparse.ArgumentParser, words: list[str], namespace: argparse.Namespace
) -> argparse.Namespace:
    try:
        words = plain_words(words, parser._option_string_actions)
    except ConfigError as error:
        parser.error(str(error))
    # Intermixed parsing accepts a model word that follows flags.
    namespace, unknown = parser.parse_known_intermixed_args(words, namespace)
    if unknown:
        flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
        parser.error(
            "; ".join(_unknown_flag(parser, flag) for flag in flags)
            if flags
            else f"unexpected arguments: {len(unknown)}. --help lists all arguments."
        )
    return namespace


def _json_flags(parser: argparse.ArgumentParser) -> set[str]:
    actions = parser._option_string_actions.items()
    return {name for name, action in actions if action.metavar == JSON_LIST}


def _single_flags(parser: argparse.ArgumentParser) -> set[str]:
    actions = parser._option_string_actions.items()
    return {name for name, action in actions if action.nargs is None}


def _unknown_flag(parser: argparse.ArgumentParser, flag: str) -> str:
    # Do not suggest hidden flags, such as vLLM's flags without effect.
    known = [
        name
        for name, action in parser._option_string_actions.items()
        if action.help is not argparse.SUPPRESS and name.startswith("--")
    ]
    word = flag.replace("_", "-").casefold()
    nearest = min(known, key=lambda name: (not name.startswith(word), _num_edits(word, name)))
    # Common words are not enough: `--max-num-active-seqs` is not `--max-num-seqs`.
    is_typo = _num_edits(word, nearest) <= min(_MAX_EDITS, len(nearest) // 4)
    is_meant = is_typo or (nearest.startswith(word) and len(word) >= _MIN_PREFIX)
    hint = f"did you mean {nearest}?" if is_meant else "--help lists all flags."
    return f"unknown flag {flag}: {hint}"


def _num_edits(word: str, other: str) -> int:
    """Number of letters to insert, delete, replace or swap to turn one word into the other."""
    rows = [list(range(len(other) + 1))]
    for i, letter in enumerate(word, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            cost = min(
                rows[-1][j] + 1,
                row[-1] + 1,
                rows[-1][j - 1] + (letter != wanted),
            )
            if i > 1 and j > 1 and (letter, word[i - 2]) == (other[j - 2], wanted):
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
