"""Messages at the start of an engine process."""

import dataclasses

from paxkv.config.engine_config import EngineConfig
from paxkv.config.sampling_defaults import SamplingDefaults
from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.rank_place import RankPlace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeatureUse:
    """Whether an engine uses a feature.

    Args:
        name: The feature's name in the answer of `/v1/models`.
        detail: A sentence that says how the engine uses the feature, or why it does not.
    """

    name: str
    is_used: bool
    detail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """One served model.

    Args:
        served_model_name: The model's name in answers of the API.
        model: Folder or Hub name from which the model was loaded.
        max_model_len: Largest number of prompt and output tokens of a request.
        vocab_size: Token ids are in `[0, vocab_size)`.
        max_fitting_tokens: Largest number of token positions that one request can hold in the pool.
        created: Seconds since the epoch.
        max_num_seqs: Largest number of requests that run at the same time.
        cache_settings: The KV cache's settings by name, as text.
        max_logprobs: Largest number of log-probabilities per position; -1 for the whole vocabulary.
        sampling_defaults: Sampling parameters for fields that a request does not set.
        other_model_names: Other names that requests may use for the model.
        feature_uses: Whether the engine uses the features that depend on model, device or settings.
        saves_states: Whether the prefix cache saves states of recurrent layers. Then chats should
            set `num_leading_tokens`.
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
    saves_states: bool = False

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names in the API, first the name in answers."""
        return (self.served_model_name, *self.other_model_names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CurveKeys:
    """ZeroMQ CURVE keys of the two bound sockets, for addresses that other users can reach.

    A process needs a socket's public key to connect to it, so the public keys are secret too.
    """

    input_public: str
    input_secret: str
    output_public: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineOrder:
    """The first line of an engine process's standard input: how the process should start.

    Args:
        input_endpoint: Endpoint at which the engine should listen; the port may be `*`.
        output_endpoint: Endpoint at which the client listens.
        folder: Folder of the sockets' files, if there are any. The process that ends last deletes
            it.
        step_counter: File descriptor of the `StepCounter` that the client created.
        show_progress: Draw a progress bar on stderr while programs compile.
        place: Place of the process among the processes of the engine. None: it is the only one.
    """

    config: EngineConfig
    input_endpoint: str
    output_endpoint: str
    step_counter: int
    folder: str | None = None
    curve_keys: CurveKeys | None = None
    show_progress: bool = False
    place: RankPlace | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineHello:
    """The first message of an engine process: the endpoint at which it listens."""

    input_endpoint: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFound:
    """The engine has found the model. The client can read the tokenizer while weights load.

    Args:
        folder: Folder of the tokenizer and the chat template.
    """

    folder: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineReady:
    """The engine accepts requests.

    Args:
        eos_token_ids: EOS tokens from config.json and generation_config.json.
        max_prompt_tokens: Longest prompt if prompts are not split over steps; None if they are.
        stats: Statistics before the first step.
    """

    model_info: ModelInfo
    eos_token_ids: tuple[int, ...]
    max_prompt_tokens: int | None
    stats: SchedulerStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStartFailed:
    """The engine could not start.

    Args:
        is_mistake: Whether a setting or the model's files are wrong. If False, paxkv or the machine
            failed.
    """

    message: str
    is_mistake: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowerReady:
    """A follower, which repeats the calls of the leader, has started."""


# Messages that an engine process may send besides `EngineOutput`.
EngineStartOutput = EngineHello | ModelFound | EngineReady | EngineStartFailed | FollowerReady
