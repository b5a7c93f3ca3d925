"""`SpeculativeConfig`: how drafts are made for speculative decoding, with vLLM's field names."""

import dataclasses
from collections.abc import Mapping

from paxkv.config.setting import at_least, one_of, true_or_false
from paxkv.errors import ConfigError

METHODS = ("ngram", "mtp", "eagle3", "draft_model")
_METHODS_WITH_MODEL = ("eagle3", "draft_model")
# Methods of vLLM that have no drafter yet.
_METHODS_WITHOUT_DRAFTER = (
    *("suffix", "eagle", "medusa", "mlp_speculator"),
    *("ngram_gpu", "dflash"),
)
MAX_SPECULATIVE_TOKENS = 64
# vLLM's length of n-grams if neither limit is set.
_DEFAULT_LOOKUP = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of the drafter.

    Args:
        method: The drafter. "ngram" finds the last tokens of a request earlier in the request, and
            proposes the tokens that followed them there. "mtp" runs the layer for multi-token
            prediction that the model's checkpoint has. "eagle3" runs the head in `model`.
            "draft_model" runs a smaller model with the same tokenizer.
        num_speculative_tokens: Most drafts of a request in one step.
        model: For "eagle3" and "draft_model", the folder of the head or of the smaller model, or
            the name of its hub repository.
        prompt_lookup_min: For "ngram", the smallest number of tokens to find. If only one of the
            two limits is set, the other one is equal to it. If none is set, both are 5.
        prompt_lookup_max: The largest number of tokens to find. The drafter tries this number
            first, and then smaller ones.
        adapts_drafts: Choose the number of drafts that a step verifies from measured times and
            acceptance; it is often 0. If False, verify all drafts. None is True. vLLM has no such
            field.

    Raises:
        ConfigError: A value is invalid, or the method has no drafter.
    """

    method: str
    num_speculative_tokens: int
    model: str | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    adapts_drafts: bool | None = None

    def __post_init__(self) -> None:
        if self.method in _METHODS_WITHOUT_DRAFTER:
            raise ConfigError(
                f"method {self.method!r} has no drafter yet; methods are {', '.join(METHODS)}."
            )
        one_of("method", self.method, METHODS)
        num_drafts = self.num_speculative_tokens
        if type(num_drafts) is not int or not 1 <= num_drafts <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                "num_speculative_tokens must be an integer in "
                f"[1, {MAX_SPECULATIVE_TOKENS}], got {num_drafts!r}."
            )
        true_or_false("adapts_drafts", self.adapts)
        if (self.model is not None) != (self.method in _METHODS_WITH_MODEL):
            needed = "needs model, the folder or the name of the drafter's checkpoint"
            refused = f"takes no model, got {self.model!r}. Leave it out"
            raise ConfigError(
                f"method {self.method!r} {needed if self.model is None else refused}."
            )
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(
                f"model must be a folder or the name of a hub repository, got {self.model!r}."
            )
        if self.is_on_device:
            self._check_fields_on_device()
        at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        at_least("prompt_lookup_max", self.prompt_lookup_max, 1)
        shortest, longest = self.lookup_lengths
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}."
            )

    def _check_fields_on_device(self) -> None:
        if self.prompt_lookup_min is not None or self.prompt_lookup_max is not None:
            raise ConfigError(
                "prompt_lookup_min and prompt_lookup_max are for method 'ngram', got method "
                f"{self.method!r}. Leave them out."
            )

    @property
    def is_on_device(self) -> bool:
        """Whether the drafter has weights, and runs on the device after steps."""
        return self.method != "ngram"

    @property
    def adapts(self) -> bool:
        """`adapts_drafts`, with its default."""
        return True if self.adapts_drafts is None else self.adapts_drafts

    @property
    def prevents_bursts(self) -> bool:
        """Whether a drafter on the device runs after every step."""
        return self.is_on_device and not self.adapts

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The smallest and the largest number of tokens to find."""
        limits = (self.prompt_lookup_min, self.prompt_lookup_max)
        given = [limit for limit in limits if limit is not None] or [_DEFAULT_LOOKUP]
        return given[0], given[-1]

    @classmethod
    def from_fields(cls, fields: object) -> "SpeculativeConfig | None":
        """Reads the JSON object of the flag; null counts as not set. `{}` is no speculation.

        Raises:
            ConfigError: It is not an object, has an unknown field, lacks a field, or a value is
                invalid.
        """
        where = "speculative_config"
        if not isinstance(fields, Mapping):
            raise ConfigError(f"{where} must be a JSON object, got {fields!r}.")
        given = {name: value for name, value in fields.items() if value is not None}
        if not given:
            return None
        known = [field.name for field in dataclasses.fields(cls)]
        missing = [name for name in ("method", "num_speculative_tokens") if name not in given]
        unknown = [name for name in given if name not in known]
        is_built = given.get("method") in METHODS or "method" in missing
        if is_built and unknown:
            raise ConfigError(
                f"{where} may have {', '.join(known)}; got {', '.join(map(str, unknown))}. Remove "
                "the unknown fields."
            )
        if is_built and missing:
            raise ConfigError(f"{where} needs {' and '.join(missing)}; got {dict(fields)!r}.")
        try:
            # If the method has no drafter, the error must name the method and not its fields.
            checked = {name: given[name] for name in known if name in given}
            return cls(**({"num_speculative_tokens": 1} | checked))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from error
