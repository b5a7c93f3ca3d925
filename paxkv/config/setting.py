"""What config classes are made of: a field with its help text, and the checks of its value."""

import dataclasses
from collections.abc import Mapping

from paxkv.errors import ConfigError


def setting(
    help_text: str,
    default: object,
    *,
    aliases: tuple[str, ...] = (),
    is_json: bool = False,
    environment: tuple[str, ...] = (),
    is_secret: bool = False,
    is_hidden: bool = False,
    spellings: Mapping[str, object] | None = None,
) -> object:
    """A config field with what the command line needs to know of it.

    Args:
        help_text: Shown with its flag.
        aliases: Other names of the flag, as in `--shutdown-timeout`.
        is_json: Whether the flag of a list takes one JSON list, instead of words.
        environment: Variables that are read where the flag is left out; the first one with a value
            wins.
        is_secret: Leaves its value out of the config's `repr` and of `GET /server_info`.
        is_hidden: Leaves its flag out of `--help`; the flag is still parsed. For settings of parts
            that are not built yet.
        spellings: Words for values, such as {"half": "float16"} or {"auto": -1}.
    """
    metadata = {
        "help": help_text,
        "aliases": aliases,
        "is_json": is_json,
        "environment": environment,
        "is_hidden": is_hidden,
        "spellings": dict(spellings or {}),
    }
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


def unspelled(config_class: type, name: str, value: object) -> object:
    """A value of a field as the config has it: "half" -> "float16"."""
    spellings = config_class.__dataclass_fields__[name].metadata["spellings"]
    return spellings.get(value, value) if isinstance(value, str) else value


def at_least(name: str, value: int | None, low: int) -> None:
    """Checks a count, where there is one.

    Raises:
        ConfigError: It is not an integer, or below `low`; so do the checks below.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}.")


def is_number(value: object) -> bool:
    """Whether a value is a number, which True is not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def true_or_false(name: str, value: object) -> None:
    """Checks a switch."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}.")


def one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    """Checks a choice."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")


def strings(name: str, value: object) -> None:
    """Checks a tuple of texts."""
    # No value is shown: some of these are secret.
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name} must be a list of strings that are not empty.")
