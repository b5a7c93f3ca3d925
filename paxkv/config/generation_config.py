"""Finds sampling defaults: a checkpoint's generation_config.json, overridden by settings."""

import dataclasses
import json
from collections.abc import Collection
from pathlib import Path

from paxkv.config.sampling_defaults import GenerationConfig, SamplingDefaults
from paxkv.errors import ConfigError

GENERATION_CONFIG_FILE = "generation_config.json"
_INTEGERS = ("top_k", "max_new_tokens")
# Values of the setting that do not name a folder: the model's own file, and no file.
FROM_MODEL, FROM_NOWHERE = "auto", "vllm"


def find_sampling_defaults(
    source: str, override: GenerationConfig, model_folder: Path
) -> SamplingDefaults:
    """Finds the sampling defaults of a model.

    Args:
        source: "auto" for the file in `model_folder`, "vllm" for no file, or another folder.
        override: Values that override the file's.

    Raises:
        ConfigError: The other folder has no such file, or a file is invalid.
    """
    if source == FROM_NOWHERE:
        return SamplingDefaults(
            generation_config=override, max_tokens_limit=override.max_new_tokens
        )
    folder = generation_config_folder(source, model_folder)
    from_file = read_generation_config(folder, without=override.given)
    merged = dataclasses.replace(from_file, **override.given)
    by_operator = override if source == FROM_MODEL else merged
    return SamplingDefaults(generation_config=merged, max_tokens_limit=by_operator.max_new_tokens)


def generation_config_folder(source: str, model_folder: Path) -> Path:
    """The folder whose generation_config.json is used. The model's folder may lack the file.

    Raises:
        ConfigError: `source` names another folder, which has no such file.
    """
    if source in (FROM_MODEL, FROM_NOWHERE):
        return model_folder
    folder = Path(source).expanduser()
    if not (folder / GENERATION_CONFIG_FILE).is_file():
        raise ConfigError(
            f"generation_config={source!r} is not a folder with a {GENERATION_CONFIG_FILE}. It "
            f"must be {FROM_MODEL} (the model's own file), {FROM_NOWHERE} (neutral defaults), or "
            "such a folder."
        )
    return folder


def read_generation_config(folder: Path, *, without: Collection[str] = ()) -> GenerationConfig:
    """Reads a folder's generation_config.json; without such a file, no field is set.

    Args:
        without: Names of fields to ignore.

    Raises:
        ConfigError: The file cannot be read, is not an object, or has an invalid value.
    """
    path = folder / GENERATION_CONFIG_FILE
    try:
        fields = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return GenerationConfig()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path} cannot be read as JSON: {error}. Correct the file or download it again."
        ) from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{path} contains a {type(fields).__name__}; it must contain a JSON object. Correct "
            "the file or download it again."
        )
    names = [
        field.name for field in dataclasses.fields(GenerationConfig) if field.name not in without
    ]
    try:
        return GenerationConfig(**{name: _as_written(name, fields.get(name)) for name in names})
    except ConfigError as error:
        raise ConfigError(
            f"{path}: {error} Correct the file, set another value with "
            "--override-generation-config, or ignore the file with --generation-config vllm."
        ) from error


def _as_written(name: str, value: object) -> object:
    """Returns the value. 20.0 becomes 20 if the field is an integer."""
    is_whole = isinstance(value, float) and value.is_integer()
    return int(value) if is_whole and name in _INTEGERS else value
