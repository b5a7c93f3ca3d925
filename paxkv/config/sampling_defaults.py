"""What requests are sampled with where they say nothing, as values; they cross to clients."""

import dataclasses
from collections.abc import Mapping

from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import ConfigError, InvalidRequestError

_MAX_NEW_TOKENS = "max_new_tokens"
_NEUTRAL = {field.name: field.default for field in dataclasses.fields(SamplingParams)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationConfig:
    """With the names of a generation_config.json; None says nothing: a request's own default holds.

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
