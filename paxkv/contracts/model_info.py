"""What a client may know of the model behind an engine."""

import dataclasses

from paxkv.config.sampling_defaults import SamplingDefaults
from paxkv.config.sampling_params import MAX_LOGPROBS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One served model.

    Args:
        served_model_name: Its name in the API, which answers tell.
        model: Folder or hub name that it was loaded from.
        max_model_len: Most tokens of prompt and output together.
        vocab_size: Token ids are in `[0, vocab_size)`.
        max_fitting_tokens: Token positions of the whole KV pool; no request can hold more.
        created: Seconds since the epoch.
        max_num_seqs: Most requests that run at once.
        cache_settings: The KV cache's settings by name, as text.
        max_logprobs: Most log-probabilities of a position; -1 is the whole vocabulary.
        sampling_defaults: Of requests that say nothing.
        other_model_names: Its other names in the API, for requests.
    """

    served_model_name: str
    model: str
    max_model_len: int
    vocab_size: int
    max_fitting_tokens: int
    created: int
    max_num_seqs: int
    cache_settings: dict[str, str]
    max_logprobs: int = MAX_LOGPROBS
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    other_model_names: tuple[str, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names in the API, the one of answers first."""
        return (self.served_model_name, *self.other_model_names)
