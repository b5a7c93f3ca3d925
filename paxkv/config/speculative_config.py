"""`SpeculativeConfig`: how drafts are made for speculative decoding, with vLLM's field names."""

import dataclasses
import math
from collections.abc import Mapping

from paxkv.config.setting import at_least, is_number, one_of, true_or_false
from paxkv.errors import ConfigError

METHODS = ("ngram", "suffix", "mtp", "eagle3", "draft_model")
_METHODS_ON_HOST = ("ngram", "suffix")
_METHODS_WITH_MODEL = ("eagle3", "draft_model")
# Methods of vLLM that have no drafter yet.
_METHODS_WITHOUT_DRAFTER = (
    *("eagle", "medusa", "mlp_speculator"),
    *("ngram_gpu", "dflash"),
)
MAX_SPECULATIVE_TOKENS = 64
# Field -> field of `SuffixLimits`.
_SUFFIX_FIELDS = {
    "suffix_decoding_max_tree_depth": "max_depth",
    "suffix_decoding_max_cached_requests": "max_cached_requests",
    "suffix_decoding_max_spec_factor": "max_spec_factor",
    "suffix_decoding_min_token_prob": "min_token_prob",
}
# vLLM's length of n-grams if neither limit is set.
_DEFAULT_LOOKUP = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SuffixLimits:
    """Limits of the method "suffix". The defaults are vLLM's.

    Args:
        max_depth: Most tokens of a match and its drafts together.
        max_cached_requests: Finished requests whose answers are kept; 0 keeps none.
        max_spec_factor: Most drafts for each token of the match.
        min_token_prob: Smallest share of the matches that must agree with a draft.
    """

    max_depth: int = 24
    max_cached_requests: int = 10_000
    max_spec_factor: float = 1.0
    min_token_prob: float = 0.1

    @property
    def max_match(self) -> int:
        """Tokens of the longest match. A longer one would leave room for fewer drafts."""
        return max(1, int(self.max_depth / (1 + self.max_spec_factor)))

    @property
    def max_drafts(self) -> int:
        """Most drafts after any match. 0 is refused by `SpeculativeConfig`."""
        by_factor = int(self.max_spec_factor * self.max_match)
        return min(by_factor, self.max_depth - self.max_match)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """Settings of the drafter.

    Args:
        method: The drafter. "ngram" finds the last tokens of a request earlier in the request, and
            proposes the tokens that followed them there. "suffix" does so with the longest match in
            the request and in answers of finished requests. "mtp" runs the layer for multi-token
            prediction that the model's checkpoint has. "eagle3" runs the head in `model`.
            "draft_model" runs a smaller model with the same tokenizer.
        num_speculative_tokens: Most drafts of a request in one step.
        model: For "eagle3" and "draft_model", the folder of the head or of the smaller model, or
            the name of its hub repository. The demo model has an "eagle3" head of its own, which
            is used if this is None.
        prompt_lookup_min: For "ngram", the smallest number of tokens to find. If only one of the
            two limits is set, the other one is equal to it. If none is set, both are 5.
        prompt_lookup_max: The largest number of tokens to find. The drafter tries this number
            first, and then smaller ones.
        drafts_in_bursts: Bursts propose drafts on the device and verify them. The engine then
            verifies drafts in single steps only while a request cannot be in a burst. None is
            False. "suffix" needs the host, so it has no drafts in bursts. vLLM has no such field.
        suffix_decoding_max_tree_depth: For "suffix", see `SuffixLimits`. None is its default.
        suffix_decoding_max_cached_requests: As above.
        suffix_decoding_max_spec_factor: As above.
        suffix_decoding_min_token_prob: As above.
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
    drafts_in_bursts: bool | None = None
    suffix_decoding_max_tree_depth: int | None = None
    suffix_decoding_max_cached_requests: int | None = None
    suffix_decoding_max_spec_factor: float | None = None
    suffix_decoding_min_token_prob: float | None = None
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
        if self.model is not None and self.method not in _METHODS_WITH_MODEL:
            raise ConfigError(
                f"method {self.method!r} takes no model, got {self.model!r}. Leave it out."
            )
        if self.method == "draft_model":
            self.check_has_model()
        if self.model is not None and not (isinstance(self.model, str) and self.model):
            raise ConfigError(
                f"model must be a folder or the name of a hub repository, got {self.model!r}."
            )
        in_bursts = self.drafts_in_bursts
        true_or_false("drafts_in_bursts", False if in_bursts is None else in_bursts)
        if in_bursts is not None and self.method == "suffix":
            raise ConfigError(
                "drafts_in_bursts does not work with method 'suffix', which looks up drafts on the "
                "host. Leave it out, or use another method."
            )
        self._check_fields_of_method("ngram", "prompt_lookup_min", "prompt_lookup_max")
        self._check_fields_of_method("suffix", *_SUFFIX_FIELDS)
        self._check_suffix_fields()
        at_least("prompt_lookup_min", self.prompt_lookup_min, 1)
        at_least("prompt_lookup_max", self.prompt_lookup_max, 1)
        shortest, longest = self.lookup_lengths
        if shortest > longest:
            raise ConfigError(
                f"prompt_lookup_min={shortest} must be at most prompt_lookup_max={longest}."
            )

    def check_has_model(self) -> None:
        """Raises an error if the method needs a model and has none."""
        if self.model is None and self.method in _METHODS_WITH_MODEL:
            raise ConfigError(
                f"method {self.method!r} needs model, the folder or the name of the drafter's "
                "checkpoint. Only the demo model has a head for 'eagle3' of its own."
            )

    def _check_fields_of_method(self, method: str, *names: str) -> None:
        given = [name for name in names if getattr(self, name) is not None]
        if given and self.method != method:
            raise ConfigError(
                f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for method "
                f"{method!r}, got method {self.method!r}. Remove what does not belong to it."
            )

    def _check_suffix_fields(self) -> None:
        at_least("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 2)
        at_least("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0)
        factor, share = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        if factor is not None and not (is_number(factor) and 0 < factor < math.inf):
            raise ConfigError(
                f"suffix_decoding_max_spec_factor must be a finite number above 0, got {factor!r}."
            )
        if self.method == "suffix" and self.suffix_limits.max_drafts < 1:
            limits = self.suffix_limits
            raise ConfigError(
                f"suffix_decoding_max_spec_factor={limits.max_spec_factor} allows no drafts after "
                f"any match of at most {limits.max_match} tokens, the longest with "
                f"suffix_decoding_max_tree_depth={limits.max_depth}. Use a larger factor, or a "
                "larger depth."
            )
        if share is not None and not (is_number(share) and 0 <= share <= 1):
            raise ConfigError(
                f"suffix_decoding_min_token_prob must be a number in [0, 1], got {share!r}."
            )

    @property
    def is_on_device(self) -> bool:
        """Whether the drafter has weights, and runs on the device after steps."""
        return self.method not in _METHODS_ON_HOST

    @property
    def adapts(self) -> bool:
        """`adapts_drafts`, with its default."""
        return True if self.adapts_drafts is None else self.adapts_drafts

    @property
    def prevents_bursts(self) -> bool:
        """Whether a drafter on the device runs after every step."""
        return self.is_on_device and not self.adapts and not self.drafts_in_bursts

    @property
    def lookup_lengths(self) -> tuple[int, int]:
        """The smallest and the largest number of tokens to find."""
        limits = (self.prompt_lookup_min, self.prompt_lookup_max)
        given = [limit for limit in limits if limit is not None] or [_DEFAULT_LOOKUP]
        return given[0], given[-1]

    @property
    def suffix_limits(self) -> SuffixLimits:
        """The limits of the method "suffix", with their defaults."""
        given = {limit: getattr(self, name) for name, limit in _SUFFIX_FIELDS.items()}
        return SuffixLimits(**{name: value for name, value in given.items() if value is not None})

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
        if given.get("method") == "suffix":
            # If a limit is invalid, the error must name the limit.
            given = {"num_speculative_tokens": 1} | given
            if fields.get("num_speculative_tokens") is None:
                max_drafts = cls.from_fields(given).suffix_limits.max_drafts
                given["num_speculative_tokens"] = min(max_drafts, MAX_SPECULATIVE_TOKENS)
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
