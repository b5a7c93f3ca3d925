"""Reads `quantization_config` of config.json."""

import re
from collections.abc import Collection, Mapping, Sequence

from models.errors import ModelConfigError, UnsupportedModelError

FIELD = "quantization_config"


def find_quantization(hf_config: Mapping[str, object]) -> Mapping[str, object] | None:
    """The fields of `quantization_config`, or of that of the text model. None: there is none.

    Raises:
        ModelConfigError: `quantization_config` is not an object.
    """
    text_config = hf_config.get("text_config")
    text_config = text_config if isinstance(text_config, Mapping) else {}
    for fields in (hf_config, text_config):
        # Early releases of compressed-tensors wrote `compression_config`.
        for name in (FIELD, "compression_config"):
            if fields.get(name):
                return as_object(fields[name], name)
    return None


def as_object(value: object, name: str) -> Mapping[str, object]:
    """Returns `value` itself.

    Raises:
        ModelConfigError: It is not an object.
    """
    if not isinstance(value, Mapping):
        raise ModelConfigError(
            f"config.json: {name} is {value!r:.80}; expected an object. Use the config.json that "
            "was published with the weights."
        )
    return value


def with_path(fields: Mapping[str, object], path: str) -> dict[str, object]:
    """The same fields under their full names, which the readers of fields put into messages."""
    return {f"{path}.{name}": value for name, value in fields.items()}


def read_choice(name: str, value: object, allowed: Collection[object]) -> object:
    """Returns `value` itself.

    Args:
        name: The full name of the field, for the message.

    Raises:
        UnsupportedModelError: It is not one of those allowed.
    """
    if value not in allowed:
        raise UnsupportedModelError(
            f"config.json: {name} is {value!r}, which is not supported; paxkv supports "
            f"{', '.join(map(repr, allowed))}. Use another release of this model."
        )
    return value


def read_names(fields: Mapping[str, object], *names: str, path: str = FIELD) -> tuple[str, ...]:
    """The list of strings in the first of these fields that is set.

    Args:
        path: The full name of the object that has the fields, for messages.

    Raises:
        ModelConfigError: It is not a list of strings.
    """
    name, value = next(((name, fields[name]) for name in names if fields.get(name)), (names[0], []))
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelConfigError(
            f"config.json: {path}.{name} is {value!r:.80}; expected a list of names of modules. "
            "Use the config.json that was published with the weights."
        )
    return tuple(value)


def compile_pattern(pattern: str, name: str) -> re.Pattern[str]:
    """Compiles a regular expression of a list of modules.

    Args:
        name: The full name of the field, for the message.

    Raises:
        ModelConfigError: It is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ModelConfigError(
            f"config.json: {name} contains {pattern!r}, which is not a regular expression "
            f"({error}). Correct it."
        ) from error


class SkippedModules:
    """The modules that `modules_to_not_convert` lists, with the rules of transformers.

    An entry matches the start of a module's name up to a dot, also as a regular expression, or the
    end of the name.

    Source: transformers 5, `should_convert_module`.
    """

    def __init__(self, entries: Sequence[str]) -> None:
        field = f"{FIELD}.modules_to_not_convert"
        for entry in entries:
            compile_pattern(entry, field)
        self._endings = tuple(entries)
        # One expression, because releases with experts have thousands of modules and entries.
        starts = "|".join(f"(?:{entry})" for entry in entries)
        self._starts = compile_pattern(rf"(?:{starts})(?:(?<=\.)|(?=\.|$))", field)

    def __contains__(self, module: str) -> bool:
        if not self._endings:
            return False
        return module.endswith(self._endings) or self._starts.match(module) is not None
