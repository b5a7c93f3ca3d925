"""Finds the part of the config to which a setting belongs, as in `--set block_size=32`."""

import argparse
import dataclasses
from collections.abc import Mapping, Sequence

from benchmarks.engine.offline_engine import Setting
from paxkv.config.engine_config import EngineConfig
from paxkv.errors import ConfigError


def settings_by_part(settings: Mapping[str, Setting]) -> dict[str, dict[str, Setting]]:
    """Groups settings by the part of `EngineConfig` that has the field.

    Raises:
        ConfigError: No part has the field.
    """
    names = {
        part.name: {field.name for field in dataclasses.fields(_part_class(part.name))}
        for part in dataclasses.fields(EngineConfig)
    }
    unknown = sorted(set(settings) - set().union(*names.values()))
    if unknown:
        raise ConfigError(
            f"paxkv has no setting {', '.join(unknown)}; see paxkv/config/*_config.py."
        )
    return {
        part: {name: value for name, value in settings.items() if name in known}
        for part, known in names.items()
    }


def engine_config(parts: Mapping[str, Mapping[str, Setting]]) -> EngineConfig:
    """Builds the config from the result of `settings_by_part`.

    Raises:
        ConfigError: A value is not allowed.
    """
    return EngineConfig(**{name: _part_class(name)(**fields) for name, fields in parts.items()})


def checked_settings(
    parser: argparse.ArgumentParser,
    pairs: Sequence[tuple[str, Setting]],
    *,
    decided_by: Mapping[str, str],
) -> dict[str, Setting]:
    """Checks settings before an engine is started; on an error, prints the usage and exits.

    Args:
        decided_by: Setting that must not be given -> the flag that sets it.
    """
    settings = dict(pairs)
    if len(settings) < len(pairs):
        parser.error(f"a setting is given twice in {', '.join(name for name, _ in pairs)}")
    for name, flag in decided_by.items():
        if name in settings:
            parser.error(f"{name} is set by {flag}; leave out {name}={settings[name]}")
    try:
        engine_config(settings_by_part(settings))
    except ConfigError as error:
        parser.error(str(error))
    return settings


def _part_class(name: str) -> type:
    field = next(f for f in dataclasses.fields(EngineConfig) if f.name == name)
    return field.default_factory
