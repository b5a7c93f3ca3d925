"""`StructuredOutputsConfig`: settings for all structured outputs of a server."""

import dataclasses
from collections.abc import Mapping

from paxkv.config.setting import true_or_false
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import ConfigError

# Accepted values of vLLM's field `backend`. paxkv has one backend and no fallback.
_BACKENDS = ("auto", "guidance")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """Settings for all structured outputs, with vLLM's field names.

    Args:
        disable_any_whitespace: As in `StructuredOutputsParams`, but for every request.
        disable_additional_properties: As in `StructuredOutputsParams`, but for every request.
        enable_in_reasoning: The grammar applies from the first token, so the model cannot write
            reasoning before its answer.

    Raises:
        ConfigError: A value is invalid.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            true_or_false(field.name, getattr(self, field.name))

    @classmethod
    def from_fields(cls, fields: object) -> "StructuredOutputsConfig":
        """Reads the JSON object of the flag."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, Mapping):
            raise ConfigError(f"expected a JSON object of {', '.join(known)}, got {fields!r}.")
        given = {**fields}
        if given.pop("backend", "auto") not in _BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, or left out.")
        true_or_false("disable_fallback", given.pop("disable_fallback", False))
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigError(
                f"structured_outputs_config may have {', '.join(known)}; got {', '.join(unknown)}."
            )
        return cls(**given)

    def apply(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """Applies these settings to the parameters of a request."""
        # A request's own whitespace pattern takes precedence.
        no_whitespace = self.disable_any_whitespace and params.whitespace_pattern is None
        return dataclasses.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or no_whitespace,
            disable_additional_properties=(
                params.disable_additional_properties or self.disable_additional_properties
            ),
        )
