"""Flags from a file: `--config serve.toml`, or JSON."""

import json
import tomllib
from collections.abc import Collection
from pathlib import Path

from paxkv.errors import ConfigError


def read_config_file(path: Path, *, json_flags: Collection[str] = ()) -> list[str]:
    """The command line that a file stands for.

    {"max-num-seqs": 32, "enable_prefix_caching": false, "api-key": ["a", "b"]} is
    --max-num-seqs=32 --no-enable-prefix-caching --api-key a b

    Args:
        json_flags: Take a list as one word, in JSON; others take its items as words.

    Raises:
        ConfigError: It cannot be read, or is not a table of flags.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            fields = tomllib.loads(text)
        elif path.suffix == ".json":
            fields = json.loads(text)
        else:
            raise ConfigError(f"--config reads .toml and .json, got {str(path)!r}.")
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"cannot read {str(path)!r}: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{str(path)!r} must hold a table of flags.")
    return [word for name, value in fields.items() for word in _words(name, value, json_flags)]


def _words(name: str, value: object, json_flags: Collection[str]) -> list[str]:
    flag = "--" + name.removeprefix("--").replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    if isinstance(value, dict) or flag in json_flags:
        return [f"{flag}={json.dumps(value)}"]
    if isinstance(value, list):
        return [flag, *map(str, value)]
    return [f"{flag}={value}"]
