"""Makes command-line flags from config classes: one flag per field, with the field's help text."""

import argparse
import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Collection
from typing import TypeVar

from paxkv.config.environment import words_from_environment
from paxkv.errors import ConfigError

_ConfigT = TypeVar("_ConfigT")
_SHORT_INTEGER = re.compile(
    r"(?P<whole>-?\d+)(?:\.(?P<fraction>\d+)(?=[kmgt]))?(?P<suffix>[kmgtKMGT])?"
)
# Names of JSON values in the help.
JSON_LIST, JSON_OBJECT = "JSON_LIST", "JSON_OBJECT"
# A flag with this value counts as not given, as in vLLM.
_DEFAULT_WORD = "None"
# Errors for invalid JSON, and for JSON that is nested too deeply.
_JSON_ERRORS = (ValueError, RecursionError)


def add_config_flags(
    parser: argparse.ArgumentParser, config_class: type, *, without: Collection[str] = ()
) -> None:
    """Adds a group with a flag for every field: `max_num_seqs` -> `--max-num-seqs`.

    Args:
        without: Fields that get no flag.
    """
    summary = (config_class.__doc__ or "").partition("\n")[0]
    group = parser.add_argument_group(config_class.__name__, summary)
    for field, field_type in _typed_fields(config_class):
        if field.name not in without:
            _add_flag(group, field, field_type)


def config_from_arguments(config_class: type[_ConfigT], namespace: argparse.Namespace) -> _ConfigT:
    """Builds a config from parsed flags; fields without a flag have their defaults.

    Raises:
        ConfigError: A value is invalid.
    """
    given = {}
    for field, field_type in _typed_fields(config_class):
        if not hasattr(namespace, field.name):
            continue
        value = getattr(namespace, field.name)
        if _is_list(field_type):
            value = field.default if list(value) == [_DEFAULT_WORD] else tuple(value)
            value = value or words_from_environment(field.metadata.get("environment", ()))
        given[field.name] = value
    return config_class(**given)


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[object], field_type: object
) -> None:
    flags = ("--" + field.name.replace("_", "-"), *field.metadata.get("aliases", ()))
    # In argparse's help texts, % starts a placeholder.
    help_text = str(field.metadata.get("help", "")).replace("%", "%%")
    is_object = dataclasses.is_dataclass(field_type)
    if field.default is not None and not _is_list(field_type) and not is_object:
        help_text += " (default: %(default)s)"
    if field.metadata.get("is_hidden"):
        help_text = argparse.SUPPRESS
    if field_type is bool:
        group.add_argument(
            *flags, action=argparse.BooleanOptionalAction, default=field.default, help=help_text
        )
    elif _is_list(field_type) and field.metadata.get("is_json"):
        group.add_argument(
            *flags,
            type=_reader(field, _json_list),
            default=field.default,
            metavar=JSON_LIST,
            help=help_text,
        )
    elif _is_list(field_type):
        metavar = field.name.rpartition("_")[2].upper()
        group.add_argument(
            *flags, nargs="+", default=field.default, metavar=metavar, help=help_text
        )
    elif is_object:
        group.add_argument(
            *flags,
            type=_reader(field, functools.partial(_json_object, field_type)),
            default=field.default,
            metavar=JSON_OBJECT,
            help=help_text,
        )
    elif typing.get_origin(field_type) is typing.Literal:
        choices = typing.get_args(field_type)
        group.add_argument(
            *flags,
            type=_reader(field, str),
            choices=choices if field.default in choices else (*choices, field.default),
            default=field.default,
            metavar=f"{{{','.join(choices)}}}",
            help=help_text,
        )
    else:
        assert isinstance(field_type, type)
        group.add_argument(
            *flags,
            type=_reader(field, _integer if field_type is int else field_type),
            default=field.default,
            metavar=field_type.__name__.upper(),
            help=help_text,
        )


def _reader(
    field: dataclasses.Field[object], read: Callable[[str], object]
) -> Callable[[str], object]:
    """Wraps `read` with the word `None`, for the default, and with the field's `spellings`."""
    spellings = {_DEFAULT_WORD: field.default, **field.metadata.get("spellings", {})}

    @functools.wraps(read)  # argparse shows its name in errors
    def read_word(word: str) -> object:
        return spellings[word] if word in spellings else read(word)

    return read_word


def _is_list(field_type: object) -> bool:
    return typing.get_origin(field_type) is tuple


def _integer(text: str) -> int:
    """An integer, or vLLM's short forms: 8k is 8,000, 8K is 8,192, 25.6k is 25,600."""
    match = _SHORT_INTEGER.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected an integer such as 8192, 8k (8,000) or 8K (8,192), got {text!r}"
        )
    whole, fraction, suffix = match["whole"], match["fraction"] or "", match["suffix"] or ""
    power = "kmgt".find(suffix.lower()) + 1 if suffix else 0
    unit = 1024**power if suffix.isupper() else 1000**power
    # Exact arithmetic: 25.6k is 256 * 1000 / 10, and 0.1234k is not an integer.
    value, rest = divmod(int(whole + fraction) * unit, 10 ** len(fraction))
    if rest:
        raise argparse.ArgumentTypeError(f"expected a whole number, got {text!r}")
    return value


def _json_list(text: str) -> list[str]:
    try:
        values = json.loads(text)
    except _JSON_ERRORS:
        values = None
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise argparse.ArgumentTypeError(
            f'expected a JSON list of strings such as \'["a", "b"]\', got {text!r}'
        )
    return values


def _json_object(config_class: type[_ConfigT], text: str) -> _ConfigT:
    """Builds a config from a JSON object such as '{"a": true}', with `from_fields` of its class."""
    try:
        return config_class.from_fields(json.loads(text))
    except (*_JSON_ERRORS, ConfigError) as error:
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r}: {error}") from None


def _typed_fields(config_class: type) -> list[tuple[dataclasses.Field[object], object]]:
    """Fields with their types. `int | None` becomes `int`, because an omitted flag is None."""
    types_by_name = typing.get_type_hints(config_class)
    return [
        (field, _without_none(types_by_name[field.name]))
        for field in dataclasses.fields(config_class)
    ]


def _without_none(field_type: object) -> object:
    # `Literal["a", "b"] | None` is a typing.Union, but `int | None` is a types.UnionType.
    if typing.get_origin(field_type) in (types.UnionType, typing.Union):
        (field_type,) = (t for t in typing.get_args(field_type) if t is not types.NoneType)
    return field_type
