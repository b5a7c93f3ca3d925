"""Start of an engine: what its process receives, and what its clients learn of it and its model."""

import dataclasses

from paxkv.config.engine_config import EngineConfig
from paxkv.config.sampling_defaults import SamplingDefaults
from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.contracts.engine_output import SchedulerStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUse:
    """Whether an engine uses a feature.

    Args:
        name: As `/v1/models` has it.
        detail: How the engine uses it, or why it does not: a sentence.
    """

    name: str
    is_used: bool
    detail: str


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
        feature_uses: Features that some models, devices or settings leave without effect.
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
    feature_uses: tuple[FeatureUse, ...] = ()

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names in the API, the one of answers first."""
        return (self.served_model_name, *self.other_model_names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """Keys of the two sockets that are bound, for addresses that other users could reach.

    Whoever does not know a socket's public key cannot talk to it; so they are secrets, too.
    """

    input_public: str
    input_secret: str
    output_public: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """What an engine process is started with; the first line of its standard input.

    Args:
        input_endpoint: Where it is to listen; a port may be `*`.
        output_endpoint: Where its client listens.
        folder: Holds the sockets' files and goes with the last of both processes, if there is one.
        step_counter: Descriptor of its `StepCounter`, which it has from its client.
        show_progress: Draw a bar on stderr while steps compile.
    """

    config: EngineConfig
    input_endpoint: str
    output_endpoint: str
    step_counter: int
    folder: str | None = None
    curve_keys: CurveKeys | None = None
    show_progress: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineHello:
    """The first message of an engine process: where it listens."""

    input_endpoint: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFound:
    """The model is found; its client can read the tokenizer while weights are loaded.

    Args:
        folder: Of the tokenizer and the chat template.
    """

    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine takes requests from now on.

    Args:
        eos_token_ids: The model's own, from config.json and generation_config.json.
        max_prompt_tokens: Longest prompt that a step can take on; None is any, in pieces.
        stats: Before the first step.
    """

    model_info: ModelInfo
    eos_token_ids: tuple[int, ...]
    max_prompt_tokens: int | None
    stats: SchedulerStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartFailed:
    """There will be no engine.

    Args:
        is_mistake: Of a setting or of the model's files; otherwise it is ours, or the machine's.
    """

    message: str
    is_mistake: bool


# What an engine process may send before and beside `EngineOutput`.
EngineStartOutput = EngineHello | ModelFound | EngineReady | EngineStartFailed
