"""Sampling defaults: a checkpoint's generation_config.json, and what the settings put on top."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path

from paxkv.errors import ConfigError, InvalidRequestError
from paxkv.sampling_params import SamplingParams

GENERATION_CONFIG_FILE = "generation_config.json"
# Sources of defaults that are no folder: the model's own file, and no file.
FROM_MODEL, FROM_NOWHERE = "auto", "vllm"
_MAX_NEW_TOKENS = "max_new_tokens"
_NEUTRAL = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """With the file's names; None says nothing, so that a request's own default holds.

    The other names of such files mean nothing here, as in vLLM: `"do_sample": false` does not make
    a model greedy, `"temperature": 0` does.

    Args:
        temperature: As `SamplingParams` has it; so are the next four.
        max_new_tokens: Its `max_tokens`, at least 1.

    Raises:
        ConfigError: A value is out of range or of the wrong type.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        most = self.max_new_tokens
        # Before SamplingParams, which would name another field.
        if most is not None and (type(most) is not int or not 1 <= most < 2**31):
            raise ConfigError(f"max_new_tokens must be an integer in [1, 2**31), got {most!r}.")
        try:
            SamplingParams(**self.sampling_keywords())
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_fields(cls, fields: object) -> "GenerationConfig":
        """From the JSON object of `override_generation_config`.

        A value of null takes back what a file says: it becomes the value that changes nothing.

        Raises:
            ConfigError: It is not an object, has an unknown key, or a value cannot work.
        """
        where = "override_generation_config"
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {fields!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigError(
                f"{where} may have {', '.join(known)}; got {', '.join(map(str, unknown))}."
            )
        if fields.get(_MAX_NEW_TOKENS, 1) is None:
            raise ConfigError(
                f"{where}: max_new_tokens must be a number. To be rid of a file's, start with "
                "--generation-config vllm, and give here what is wanted of its other values."
            )
        given = {n: _NEUTRAL[n] if value is None else value for n, value in fields.items()}
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, *, without: Collection[str] = ()) -> "GenerationConfig":
        """What a folder's generation_config.json says; nothing where there is no such file.

        Args:
            without: Names that are not looked at.

        Raises:
            ConfigError: It cannot be read, is not an object, or a value cannot work.
        """
        path = folder / GENERATION_CONFIG_FILE
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return cls()
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"cannot read {path}: {error}. Download it again.") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"{path} holds a {type(fields).__name__}; wanted a JSON object.")
        names = [field.name for field in dataclasses.fields(cls) if field.name not in without]
        try:
            return cls(**{name: fields.get(name) for name in names})
        except ConfigError as error:
            raise ConfigError(
                f"{path}: {error} Mend it, give another value with --override-generation-config, "
                "or pass over the file's sampling defaults with --generation-config vllm."
            ) from error

    @property
    def given(self) -> dict[str, float | int]:
        """What is said, by name."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in named if value is not None}

    @property
    def changes(self) -> dict[str, float | int]:
        """What is said and is not neutral anyway."""
        return {n: v for n, v in self.given.items() if n not in _NEUTRAL or v != _NEUTRAL[n]}

    def sampling_keywords(self) -> dict[str, float | int]:
        """What is said, as arguments of SamplingParams."""
        keywords = self.given
        if _MAX_NEW_TOKENS in keywords:
            keywords["max_tokens"] = keywords.pop(_MAX_NEW_TOKENS)
        return keywords


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What requests are sampled with where they say nothing.

    Args:
        generation_config: File and settings together.
        max_tokens_limit: Most new tokens of any request over HTTP, whatever it says; None is no
            limit. The number that the operator gave: that of the model's own file is what its
            authors suggest, and limits nobody who asks for more.
    """

    generation_config: GenerationConfig = GenerationConfig()
    max_tokens_limit: int | None = None


def find_sampling_defaults(
    source: str, override: GenerationConfig, model_folder: Path
) -> SamplingDefaults:
    """Those of a model.

    Args:
        source: "auto" is `model_folder`, "vllm" no file at all; else another folder.
        override: On top of the file.

    Raises:
        ConfigError: The other folder has no such file, or a file cannot work.
    """
    if source == FROM_NOWHERE:
        return SamplingDefaults(
            generation_config=override, max_tokens_limit=override.max_new_tokens
        )
    folder = generation_config_folder(source, model_folder)
    from_file = GenerationConfig.from_folder(folder, without=override.given)
    merged = dataclasses.replace(from_file, **override.given)
    by_operator = override if source == FROM_MODEL else merged
    return SamplingDefaults(generation_config=merged, max_tokens_limit=by_operator.max_new_tokens)


def generation_config_folder(source: str, model_folder: Path) -> Path:
    """Whose generation_config.json counts; that of the model may be missing.

    Raises:
        ConfigError: Another folder was named, and has none.
    """
    if source in (FROM_MODEL, FROM_NOWHERE):
        return model_folder
    folder = Path(source).expanduser()
    if not (folder / GENERATION_CONFIG_FILE).is_file():
        raise ConfigError(
            f"generation_config={source!r} must be {FROM_MODEL} (the model's own file), "
            f"{FROM_NOWHERE} (neutral defaults), or a folder with a {GENERATION_CONFIG_FILE}, "
            "which that is not."
        )
    return folder
