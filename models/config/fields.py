"""Typed reads of single fields of a config.json, with errors that name the field."""

import math
from collections.abc import Mapping, Sequence

from models.errors import ModelConfigError, UnsupportedModelError

CONFIG_FILE = "config.json"


def _as_integer(value: object) -> object:
    """An integer that is written as a float, such as 1024.0, as an int; other values unchanged."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_integer(value: object) -> bool:
    """Whether a value is an integer. Unlike in Python, a boolean is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def read_count(
    fields: Mapping[str, object], name: str, default: int | None = None, *, minimum: int = 1
) -> int:
    """Reads an integer of at least `minimum`; 1024.0 is 1024.

    A missing or null field is `default`, or an error without one.
    """
    value = _as_integer(fields.get(name))
    if value is None:
        value = default
    if not _is_integer(value) or value < minimum:
        allowed = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        raise _bad_field(name, value, allowed)
    return value


def read_number(fields: Mapping[str, object], name: str, default: float | None = None) -> float:
    """Reads a positive number; a missing or null field is `default`, or an error without one."""
    value = fields.get(name)
    if value is None:
        value = default
    # NaN fails the comparison.
    is_positive = isinstance(value, float) or _is_integer(value)
    if not is_positive or not 0 < value < math.inf:
        raise _bad_field(name, value, "a positive number")
    return float(value)


def read_optional_number(fields: Mapping[str, object], name: str) -> float | None:
    """Reads a positive number; None if it is missing, null or 0, as in transformers."""
    return read_number(fields, name) if fields.get(name) else None


def read_flag(fields: Mapping[str, object], name: str, default: bool = False) -> bool:
    """Reads true or false; a missing or null field is `default`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad_field(name, value, "true or false")
    return value


def read_token_ids(
    fields: Mapping[str, object], name: str, *, file: str = CONFIG_FILE
) -> tuple[int, ...]:
    """Reads a token id or a list of them; a missing or null field is empty.

    Negative numbers are left out: in old checkpoints, -1 means that there is no such token.

    Args:
        file: The name of the file, for the message.
    """
    value = fields.get(name)
    if value is None:
        return ()
    token_ids = [_as_integer(id_) for id_ in (value if isinstance(value, list) else [value])]
    if not all(map(_is_integer, token_ids)):
        raise _bad_field(name, value, "a token id or a list of token ids", file=file)
    return tuple(token_id for token_id in token_ids if token_id >= 0)


def read_layer_numbers(fields: Mapping[str, object], name: str) -> list[int] | None:
    """Reads a list of layer numbers; None if it is missing or null."""
    value = fields.get(name)
    if value is None:
        return None
    numbers = list(map(_as_integer, value)) if isinstance(value, list) else [None]
    if not all(map(_is_integer, numbers)):
        raise _bad_field(name, value, "a list of layer numbers")
    return numbers


def read_object(fields: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Reads an object, such as `rope_scaling`. A missing or null one is empty.

    Raises:
        ModelConfigError: The field is not an object.
    """
    value = fields.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise _bad_field(name, value, "an object")
    return value


def with_defaults(
    fields: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """Adds a family's defaults for fields that are missing or null. A null token id stays null.

    Without this function, a null field would get the default of the function that reads it, which
    other families share.
    """
    given = {
        name: value
        for name, value in fields.items()
        if value is not None or name not in defaults or name.endswith("_token_id")
    }
    return {**defaults, **given}


def first_given(fields: Mapping[str, object], names: Sequence[str]) -> str:
    """The first name of a field that has several, and which is not null; or the first name.

    Raises:
        ModelConfigError: Another name has another value. Which one transformers uses depends on
            the family.
    """
    given = [name for name in names if fields.get(name) is not None]
    for name in given[1:]:
        if fields[name] != fields[given[0]]:
            raise ModelConfigError(
                f"config.json: {given[0]} is {fields[given[0]]!r}, and {name} is "
                f"{fields[name]!r}; both name the same field. Remove the wrong one."
            )
    return given[0] if given else names[0]


def with_main_names(
    fields: Mapping[str, object], main_names: Mapping[str, str]
) -> dict[str, object]:
    """Adds the fields that config.json has under another name, under their main name.

    Args:
        main_names: Other name -> main name.

    Raises:
        ModelConfigError: As `first_given`.
    """
    added = dict(fields)
    for other, main in main_names.items():
        added[main] = added.get(first_given(added, (main, other)))
    return {name: value for name, value in added.items() if value is not None or name in fields}


def refuse_other_values(fields: Mapping[str, object], supported: Mapping[str, object]) -> None:
    """Checks the fields for which a family supports one value only.

    Args:
        supported: The value of each field. A missing or null field has this value.

    Raises:
        UnsupportedModelError: A field has another value.
    """
    for name, value in supported.items():
        if fields.get(name) not in (None, value):
            allowed = "a config.json without this field" if value is None else repr(value)
            raise UnsupportedModelError(
                f"config.json: {name}={fields[name]!r} is not supported for this architecture; "
                f"paxkv supports {allowed}."
            )


def _bad_field(
    name: str, found: object, allowed: str, *, file: str = CONFIG_FILE
) -> ModelConfigError:
    if isinstance(found, str):
        allowed += ", without quotation marks"
    return ModelConfigError(
        f"{file}: {name} is {'missing' if found is None else repr(found)}; expected {allowed}. "
        f"Use the {file} that was published with the weights."
    )
