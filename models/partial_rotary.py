"""Rotary embeddings that turn only the first dimensions of each head, and how they are read."""

from collections.abc import Mapping
from dataclasses import dataclass

from models.attention_config import AttentionConfig
from models.config_fields import read_number
from models.errors import ModelConfigError
from models.rope_config import RopeConfig

_FACTOR = "partial_rotary_factor"
_HOLDERS = ("rope_scaling", "rope_parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialRotaryConfig(AttentionConfig):
    """Attention that turns the first `rotary_dim` dimensions of each head and keeps the others."""

    rotary_dim: int

    def __post_init__(self) -> None:
        # A slotted dataclass is made anew, so that super() without arguments would not find it.
        AttentionConfig.__post_init__(self)
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ModelConfigError(
                f"config.json: {_FACTOR} makes rotary embeddings turn {self.rotary_dim} of "
                f"{self.head_dim} dimensions of a head; wanted an even number from 2 to "
                f"{self.head_dim}."
            )

    @property
    def rotary(self) -> tuple[RopeConfig, int]:
        """As in the base class; the angles are those of a head of `rotary_dim` dimensions."""
        return self.rope, self.rotary_dim


def read_rotary_factor(hf_config: Mapping[str, object], default: float) -> float:
    """Reads which share of a head is turned, from both generations of config.json.

    As in transformers, the factor among the rope parameters wins over a top-level one.

    Raises:
        ModelConfigError: It is not a positive number.
    """
    # Where both spellings are present the older wins, as in `parse_rope_config`.
    holders = [hf_config[name] for name in _HOLDERS if hf_config.get(name)]
    default = read_number(hf_config, _FACTOR, default)
    if holders and isinstance(holders[0], Mapping):
        return read_number(holders[0], _FACTOR, default)
    return default


def without_rotary_factor(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json for `parse_rope_config`, which refuses the factor if it is not read."""
    return {
        name: _without_factor(value) if name in _HOLDERS and isinstance(value, Mapping) else value
        for name, value in _without_factor(hf_config).items()
    }


def _without_factor(fields: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in fields.items() if name != _FACTOR}
