"""Fields of config classes with their help texts, and checks of values."""

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
    """A config field with the metadata for its command-line flag.

    Args:
        help_text: Help text of the flag.
        aliases: Other names of the flag, such as `--shutdown-timeout`.
        is_json: Whether a list is given as one JSON list instead of several words.
        environment: Environment variables to read if the flag is left out. The first variable with
            a value is used.
        is_secret: Omit the value from the config's `repr` and from `GET /server_info`.
        is_hidden: Omit the flag from `--help`, but still parse it. For unfinished features.
        spellings: Words that stand for values, such as {"half": "float16"} or {"auto": -1}.
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
    """Replaces a word by the value that it stands for: "half" -> "float16"."""
    spellings = config_class.__dataclass_fields__[name].metadata["spellings"]
    return spellings.get(value, value) if isinstance(value, str) else value


def at_least(name: str, value: int | None, low: int) -> None:
    """Checks that a count is None or an integer of at least `low`.

    Raises:
        ConfigError: The check fails. The other checks below raise it too.
    """
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}.")


def is_number(value: object) -> bool:
    """Whether a value is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def true_or_false(name: str, value: object) -> None:
    """Checks that a value is a bool."""
    if not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, got {value!r}.")


def one_of(name: str, value: object, allowed: tuple[str | None, ...]) -> None:
    """Checks that a value is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(map(str, allowed))}, got {value!r}.")


def strings(name: str, value: object) -> None:
    """Checks that a value is a tuple of non-empty strings."""
    # The error shows no value, because some are secret.
    if not isinstance(value, tuple) or not all(isinstance(item, str) and item for item in value):
        raise ConfigError(f"{name} must be a list of strings that are not empty.")
