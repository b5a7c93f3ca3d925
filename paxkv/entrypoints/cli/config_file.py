"""Reads flags from a YAML, TOML or JSON file: `--config serve.yaml`."""

import json
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path

import yaml

from paxkv.errors import ConfigError


def read_config_file(
    path: Path,
    *,
    json_flags: Collection[str] = (),
    single_flags: Collection[str] = (),
    known_flags: Collection[str] | None = None,
) -> list[str]:
    """Converts a file to words of a command line.

    {"max-num-seqs": 32, "enable_prefix_caching": false, "api-key": ["a", "b"]} is
    --max-num-seqs=32 --no-enable-prefix-caching --api-key a b

    A flag whose value is null is omitted.

    Args:
        json_flags: Flags whose list is one JSON word. For other flags, each item is a word.
        single_flags: Flags with exactly one value. A further word would be read as the model.
        known_flags: All flags. A key that is none of them is kept even if its value is null, so
            that the parser reports it as unknown.

    Raises:
        ConfigError: The file cannot be read, or is not a table of flags.
    """
    fields = _read_table(path)
    words: list[str] = []
    for name, value in fields.items():
        # In `override_generation_config.top_p`, the key after the dot does not change.
        head, dot, key = name.removeprefix("--").partition(".")
        flag = "--" + head.replace("_", "-") + dot + key
        if dot:
            words.append(f"{flag}={json.dumps(value)}")
            continue
        if flag == "--config":
            raise ConfigError(f"{str(path)!r} names another file of flags; put its flags here.")
        is_one_word = flag in single_flags and flag not in json_flags
        if is_one_word and isinstance(value, list) and len(value) != 1:
            raise ConfigError(f"{name} in {str(path)!r} takes one value, got {len(value)}.")
        if value is not None:
            words += _words(flag, value, json_flags)
        elif known_flags is not None and flag not in known_flags:
            words.append(flag)
    return words


def _read_table(path: Path) -> dict[str, object]:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise ConfigError(f"--config reads {', '.join(_READERS)}, got {str(path)!r}.")
    try:
        fields = reader(path.read_text(encoding="utf-8-sig"))
    # For malformed files, YAML raises YAMLError and the other readers raise ValueError. Lists that
    # are nested too deeply raise RecursionError.
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(fields, dict) or not all(isinstance(name, str) for name in fields):
        raise ConfigError(f"{str(path)!r} must contain a table of flags with names as keys.")
    return fields


class _YamlLoader(yaml.SafeLoader):
    """Rejects duplicate keys, as TOML does, because one of the values would be lost."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key occurs twice in one table", node.start_mark
            )
        return found


def _read_yaml(text: str) -> object:
    return yaml.load(text, Loader=_YamlLoader)


_READERS: dict[str, Callable[[str], object]] = {
    ".yaml": _read_yaml,
    ".yml": _read_yaml,
    ".toml": tomllib.loads,
    ".json": json.loads,
}


def _words(flag: str, value: object, json_flags: Collection[str]) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, dict) or flag in json_flags:
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
