"""`StructuredOutputsConfig`: what the structured outputs of a server have in common."""

import dataclasses
from collections.abc import Mapping

from paxkv.config.setting import true_or_false
from paxkv.config.structured_outputs_params import StructuredOutputsParams
from paxkv.errors import ConfigError

# vLLM's fields that choose among backends: here there is one, which does not fall back.
_BACKENDS = ("auto", "guidance")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """With vLLM's field names.

    Args:
        disable_any_whitespace: As in `StructuredOutputsParams`, for every request.
        disable_additional_properties: The same.
        enable_in_reasoning: A form binds the whole answer, which has no thoughts then.

    Raises:
        ConfigError: A value cannot work.
    """

    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    enable_in_reasoning: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            true_or_false(field.name, getattr(self, field.name))

    @classmethod
    def from_fields(cls, fields: object) -> "StructuredOutputsConfig":
        """From a JSON object, as a flag has it."""
        known = [field.name for field in dataclasses.fields(cls)]
        if not isinstance(fields, Mapping):
            raise ConfigError(f"wanted a JSON object of {', '.join(known)}, got {fields!r}.")
        given = {**fields}
        if given.pop("backend", "auto") not in _BACKENDS:
            raise ConfigError(f"backend must be one of {', '.join(_BACKENDS)}, or left out.")
        true_or_false("disable_fallback", given.pop("disable_fallback", False))
        unknown = sorted(given.keys() - set(known))
        if unknown:
            raise ConfigError(f"it may have {', '.join(known)}; got {', '.join(unknown)}.")
        return cls(**given)

    def apply(self, params: StructuredOutputsParams) -> StructuredOutputsParams:
        """What a request asks for, with what holds for all of them."""
        # A pattern of its own says more.
        no_whitespace = self.disable_any_whitespace and params.whitespace_pattern is None
        return dataclasses.replace(
            params,
            disable_any_whitespace=params.disable_any_whitespace or no_whitespace,
            disable_additional_properties=(
                params.disable_additional_properties or self.disable_additional_properties
            ),
        )
