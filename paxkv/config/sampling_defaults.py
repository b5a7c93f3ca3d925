"""Defaults for sampling parameters that a request does not set."""

import dataclasses
from collections.abc import Mapping

from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import ConfigError, InvalidRequestError

_MAX_NEW_TOKENS = "max_new_tokens"
_NEUTRAL = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """The supported fields of a generation_config.json.

    None means that the field is not set, so the default of `SamplingParams` applies. Other fields
    of such files are ignored, as in vLLM. For example, `"do_sample": false` does not make a model
    greedy, but `"temperature": 0` does.

    Args:
        temperature: As in `SamplingParams`, like the next four fields.
        max_new_tokens: `max_tokens` of `SamplingParams`, at least 1.

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
        # Check here, because an error of SamplingParams would name the field `max_tokens`.
        if most is not None and (type(most) is not int or not 1 <= most < 2**31):
            raise ConfigError(f"max_new_tokens must be an integer in [1, 2**31), got {most!r}.")
        try:
            SamplingParams(**self.sampling_keywords())
        except InvalidRequestError as error:
            raise ConfigError(str(error)) from error

    @classmethod
    def from_fields(cls, fields: object) -> "GenerationConfig":
        """Reads the JSON object of `override_generation_config`.

        A null overrides the file's value with the neutral default of `SamplingParams`.

        Raises:
            ConfigError: It is not an object, has an unknown key, or a value is invalid.
        """
        where = "override_generation_config"
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {fields!r}.")
        known = [field.name for field in dataclasses.fields(cls)]
        unknown = [name for name in fields if name not in known]
        if unknown:
            raise ConfigError(
                f"{where} may have {', '.join(known)}; got {', '.join(map(str, unknown))}. Remove "
                "the unknown keys."
            )
        if fields.get(_MAX_NEW_TOKENS, 1) is None:
            raise ConfigError(
                f"{where}: max_new_tokens must be a number, got null. To remove the file's limit, "
                f"start with --generation-config vllm, and set the file's other values in {where}."
            )
        given = {n: _NEUTRAL[n] if value is None else value for n, value in fields.items()}
        try:
            return cls(**given)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error

    @property
    def given(self) -> dict[str, float | int]:
        """The fields that are set, by name."""
        named = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return {name: value for name, value in named if value is not None}

    @property
    def changes(self) -> dict[str, float | int]:
        """The fields that are set to other values than the neutral defaults."""
        return {n: v for n, v in self.given.items() if n not in _NEUTRAL or v != _NEUTRAL[n]}

    def sampling_keywords(self) -> dict[str, float | int]:
        """The fields that are set, as arguments of SamplingParams."""
        keywords = self.given
        if _MAX_NEW_TOKENS in keywords:
            keywords["max_tokens"] = keywords.pop(_MAX_NEW_TOKENS)
        return keywords


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Defaults for sampling parameters that a request does not set.

    Args:
        generation_config: The generation_config.json, with the operator's settings applied.
        max_tokens_limit: Largest number of new tokens of any request over HTTP; None for no limit.
            Only the operator sets this limit. The `max_new_tokens` of the model's own file is only
            a default.
    """

    generation_config: GenerationConfig = GenerationConfig()
    max_tokens_limit: int | None = None
