"""Command lines made of config classes: one flag per field, with the field's help."""

import argparse
import dataclasses
import types
import typing
from collections.abc import Collection
from typing import TypeVar

_ConfigT = TypeVar("_ConfigT")


def add_config_flags(
    parser: argparse.ArgumentParser, config_class: type, *, without: Collection[str] = ()
) -> None:
    """Adds a group with a flag for every field: `max_num_seqs` -> `--max-num-seqs`.

    Args:
        without: Fields that get none.
    """
    summary = (config_class.__doc__ or "").partition("\n")[0]
    group = parser.add_argument_group(config_class.__name__, summary)
    for field, field_type in _typed_fields(config_class):
        if field.name not in without:
            _add_flag(group, field, field_type)


def config_from_arguments(config_class: type[_ConfigT], namespace: argparse.Namespace) -> _ConfigT:
    """The config that the flags describe; fields without a flag have their defaults.

    Raises:
        ConfigError: A value cannot work.
    """
    names = {field.name for field in dataclasses.fields(config_class)}
    given = {name: value for name, value in vars(namespace).items() if name in names}
    return config_class(**given)


def _add_flag(
    group: argparse._ArgumentGroup, field: dataclasses.Field[object], field_type: object
) -> None:
    flag = "--" + field.name.replace("_", "-")
    # In argparse's help texts a % begins a placeholder.
    help_text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is not None:
        help_text += " (default: %(default)s)"
    if field_type is bool:
        group.add_argument(
            flag, action=argparse.BooleanOptionalAction, default=field.default, help=help_text
        )
    elif typing.get_origin(field_type) is typing.Literal:
        choices = typing.get_args(field_type)
        group.add_argument(flag, choices=choices, default=field.default, help=help_text)
    else:
        assert isinstance(field_type, type)
        group.add_argument(
            flag,
            type=field_type,
            default=field.default,
            metavar=field_type.__name__.upper(),
            help=help_text,
        )


def _typed_fields(config_class: type) -> list[tuple[dataclasses.Field[object], object]]:
    """Fields with their types; `int | None` counts as `int`, because a flag left out is None."""
    types_by_name = typing.get_type_hints(config_class)
    return [
        (field, _without_none(types_by_name[field.name]))
        for field in dataclasses.fields(config_class)
    ]


def _without_none(field_type: object) -> object:
    # `Literal["a", "b"] | None` is a typing.Union, `int | None` is not.
    if typing.get_origin(field_type) in (types.UnionType, typing.Union):
        (field_type,) = (t for t in typing.get_args(field_type) if t is not types.NoneType)
    return field_type
