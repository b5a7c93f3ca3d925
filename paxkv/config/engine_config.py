"""All settings of an engine, with their help texts. They are checked at construction."""

import dataclasses
import json
from typing import Literal

from paxkv.config.generation_config import FROM_MODEL
from paxkv.config.sampling_defaults import GenerationConfig
from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.config.server_config import ServerConfig as ServerConfig
from paxkv.config.setting import at_least, is_number, one_of, setting, strings, true_or_false
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
ProductDtype = Literal["auto", "bfloat16", "int8"]
Quantization = Literal["none", "checkpoint", "int8", "int4", "fp8"]
QUANTIZATION_GROUP_SIZES = (32, 64, 128)
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16"]
SchedulerPolicy = Literal["fcfs", "priority"]
PrefixCachingHashAlgo = Literal["sha256", "sha256_cbor", "xxhash"]
KVEventPublisherKind = Literal["zmq", "null"]
KVEventsWireFormat = Literal["vllm-0.16", "vllm-0.32"]
KVBlockHashType = Literal["int", "bytes"]
Kernels = Literal["auto", "xla"]
MAX_DECODE_BURST = 64
# Counts of a window are 32-bit integers on the device, enough for 596,000 tokens per second.
MAX_EXPERT_LOAD_WINDOW_S = 3600
# Value of `max_model_len`: the longest length that fits into the KV cache.
FIT_MEMORY = -1
AUTO_MODEL_IMPL = "auto"
ChatTemplateContentFormat = Literal["auto", "string", "openai"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The model, its precision and its length limit."""

    model: str | None = setting(
        "folder of a Hugging Face checkpoint, its name on the hub, or a GGUF file, on the hub "
        "OWNER/NAME:QUANT; the embedded demo model if left out",
        None,
    )
    revision: str | None = setting(
        "branch, tag or commit of a model on the hub; the main branch if left out", None
    )
    tokenizer: str | None = setting(
        "folder of another tokenizer and its chat template, or their name on the hub; the model's "
        "own if left out",
        None,
    )
    tokenizer_revision: str | None = setting(
        "branch, tag or commit of the tokenizer on the hub; --revision if the tokenizer is the "
        "model's own, else the main branch",
        None,
    )
    hf_token: str | None = setting(
        "access token of the hub, for gated repositories. If left out, it is HF_TOKEN, or the "
        "token of `hf auth login`. Other users of the machine can see the flags of a process, but "
        "not its variables",
        None,
        is_secret=True,
    )
    served_model_name: tuple[str, ...] = setting(
        "names in the API; answers contain the first one. The value of --model if left out", ()
    )
    dtype: Dtype = setting(
        "precision of weights and activations; auto is float32 on the CPU and the checkpoint's "
        "own elsewhere",
        "auto",
        spellings={"half": "float16", "float": "float32"},
    )
    product_dtype: ProductDtype = setting(
        "precision of weights and activations in matrix products; auto is that of --dtype. "
        "bfloat16 and int8 are faster on processors that have instructions for them, and change "
        "answers: docs/guide/tuning.md says by how much",
        "auto",
    )
    quantization: Quantization = setting(
        "form in which matrices and experts stay in memory. int8, int4 and fp8 quantize them while "
        "the model loads, and change answers: docs/guide/tuning.md says by how much. Activations "
        "are not rounded. checkpoint keeps the numbers of a quantized checkpoint, with the same "
        "answers as none, which widens them to --dtype",
        "none",
    )
    quantization_group_size: int = setting(
        "inputs of a matrix that share a scale with --quantization: 32, 64 or 128. Small groups "
        "are more accurate and take more memory. A matrix whose number of inputs is not a multiple "
        "gets the largest size that divides both numbers",
        128,
    )
    seed: int = setting("seed of random weights, and of requests without a seed", 0)
    max_model_len: int | None = setting(
        "largest number of prompt and output tokens of a request. If left out, it is the model's "
        "own limit, with its rotary embedding's scaling. If the KV cache has no room for one "
        "request of that length, it is the longest length that fits, with a warning. auto, or -1, "
        "is the same without the warning",
        None,
        spellings={"auto": FIT_MEMORY},
    )
    load_format: LoadFormat = setting(
        "auto reads safetensors or GGUF; dummy makes random weights", "auto"
    )
    model_impl: str = setting(
        "class that runs the model: auto is paxkv's class for the architecture in config.json; "
        "module:Class or path/to/file.py:Class is a class of your own, in a module on Python's "
        "path or in the current folder: docs/guide/adding-a-model.md",
        AUTO_MODEL_IMPL,
    )
    chat_template: str | None = setting(
        "jinja template of chats, instead of the checkpoint's: a file, or the template itself in "
        "a single line",
        None,
    )
    chat_template_content_format: ChatTemplateContentFormat = setting(
        "whether the chat template expects the contents of messages as strings, or as OpenAI's "
        "lists of parts; auto finds out from the template",
        "auto",
    )
    generation_config: str = setting(
        "source of the generation_config.json with defaults for sampling parameters that requests "
        "do not set: auto is the model's own file, vllm is no file (temperature 1, no filters), "
        "any other value is a folder. The folder's max_new_tokens also limits requests that ask "
        "for more",
        FROM_MODEL,
    )
    override_generation_config: GenerationConfig = setting(
        "JSON object that overrides values of that file: temperature, top_p, top_k, min_p, "
        "repetition_penalty and max_new_tokens, which also limits requests that ask for more",
        GenerationConfig(),
    )

    def __post_init__(self) -> None:
        one_of(
            "chat_template_content_format",
            self.chat_template_content_format,
            ChatTemplateContentFormat.__args__,
        )
        one_of("product_dtype", self.product_dtype, ProductDtype.__args__)
        one_of("quantization", self.quantization, Quantization.__args__)
        one_of("quantization_group_size", self.quantization_group_size, QUANTIZATION_GROUP_SIZES)
        if self.quantization != "none" and self.product_dtype != "auto":
            raise ConfigError(
                f"quantization is {self.quantization!r} and product_dtype is "
                f"{self.product_dtype!r}; matrices have one form. Set one of the two."
            )
        one_of("dtype", self.dtype, Dtype.__args__)
        one_of("load_format", self.load_format, LoadFormat.__args__)
        _model_impl(self.model_impl)
        if self.max_model_len != FIT_MEMORY:
            at_least("max_model_len", self.max_model_len, 2)
        for name in ("revision", "tokenizer", "tokenizer_revision"):
            if not (getattr(self, name) is None or isinstance(getattr(self, name), str)):
                raise ConfigError(f"{name} must be a string, got {getattr(self, name)!r}.")
        if self.hf_token is not None and not (isinstance(self.hf_token, str) and self.hf_token):
            kind = type(self.hf_token).__name__
            raise ConfigError(
                f"hf_token must be an access token of the hub, got a {kind} without one. Without "
                "the setting, HF_TOKEN or the token of `hf auth login` is used."
            )
        strings("served_model_name", self.served_model_name)
        if self.model is None and len(self.served_model_name) > 1:
            # `--served-model-name demo PATH` must not serve the demo model under the name PATH.
            raise ConfigError(
                f"served_model_name has {len(self.served_model_name)} names, but no model is "
                "named: the flag takes all words that follow it. Put the model before the flag, or "
                "use --model."
            )
        if not isinstance(self.generation_config, str) or not self.generation_config:
            raise ConfigError(
                f"generation_config must be auto, vllm or a folder, got {self.generation_config!r}."
            )
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            raise ConfigError(f"seed must be an integer of 64 bits, got {self.seed!r}.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVEventsConfig:
    """Endpoints and format of KV cache events. The fields are vLLM's, except the last three.

    Events contain the token ids of prompts, and subscribers need no password. So the default
    endpoint, unlike vLLM's, accepts only programs of the same machine.

    Args:
        enable_kv_cache_events: False publishes no events, as if there were no config.
        publisher: "null" drops events.
        endpoint: ZeroMQ address to publish on. `*` is every interface, and port 0 any free port.
        replay_endpoint: Address at which subscribers request missed batches; None for no replay.
        buffer_steps: Number of batches kept for replay.
        hwm: Number of batches kept for a slow subscriber. It misses further batches.
        max_queue_size: Number of batches that may wait to be sent. If there are more, the oldest
            is dropped.
        topic: Prefix of every message, by which subscribers can filter.
        wire_format: The version of vLLM whose subscribers can decode the events. "vllm-0.16"
            cannot name KV cache groups.
        block_hash_type: "int" sends the last 8 bytes of a hash as an integer, which is vLLM's
            default; "bytes" sends the whole hash.
        data_parallel_rank: Number sent with each batch; the replica's, with `data_parallel_size`.
    """

    enable_kv_cache_events: bool = True
    publisher: KVEventPublisherKind = "zmq"
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    wire_format: KVEventsWireFormat = "vllm-0.16"
    block_hash_type: KVBlockHashType = "int"
    data_parallel_rank: int = 0

    def __post_init__(self) -> None:
        true_or_false("enable_kv_cache_events", self.enable_kv_cache_events)
        one_of("publisher", self.publisher, KVEventPublisherKind.__args__)
        _zmq_endpoint("endpoint", self.endpoint)
        if self.replay_endpoint is not None:
            _zmq_endpoint("replay_endpoint", self.replay_endpoint)
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value < 2**31:
                raise ConfigError(f"{name} must be an integer in [1, 2**31), got {value!r}.")
        if not isinstance(self.topic, str):
            raise ConfigError(f"topic must be a string, got {self.topic!r}.")
        one_of("wire_format", self.wire_format, KVEventsWireFormat.__args__)
        one_of("block_hash_type", self.block_hash_type, KVBlockHashType.__args__)
        at_least("data_parallel_rank", self.data_parallel_rank, 0)

    @staticmethod
    def from_json(text: str) -> "KVEventsConfig":
        """Reads the config from a JSON object.

        Raises:
            ConfigError: The text is not a JSON object, has an unknown key, or has an invalid value.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"kv_events_config is not JSON: {error}; got {text!r}.") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"kv_events_config must be a JSON object, got {text!r}.")
        known = [field.name for field in dataclasses.fields(KVEventsConfig)]
        unknown = sorted(set(fields) - set(known))
        if unknown:
            raise ConfigError(
                f"kv_events_config has no {', '.join(unknown)}; it has {', '.join(known)}."
            )
        try:
            return KVEventsConfig(**fields)
        except ConfigError as error:
            raise ConfigError(f"kv_events_config: {error}") from error


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: int | None = setting(
        "token positions in a block of KV memory; if left out, 16, or 64 on the CPU, which reads "
        "small blocks more slowly",
        None,
    )
    kv_cache_dtype: KVCacheDtype = setting(
        "precision in which keys and values are stored; auto is float32 on the CPU and the model's "
        "elsewhere. On the CPU, float16 and bfloat16 need half of the memory, and change answers: "
        "docs/guide/tuning.md says by how much. Other devices have no choice yet",
        "auto",
    )
    enable_prefix_caching: bool = setting("share KV blocks between equal prompt prefixes", True)
    mamba_cache_dtype: KVCacheDtype = setting(
        "precision in which states of recurrent layers and windows of convolutions are stored; "
        "auto is float32. 16 bits need half of the memory, and change answers",
        "auto",
    )
    mamba_ssm_cache_dtype: KVCacheDtype = setting(
        "precision in which states of recurrent layers are stored, without windows of "
        "convolutions; auto is mamba_cache_dtype or, if that is auto too, what the checkpoint "
        "says, which is float32 if it says nothing",
        "auto",
    )
    state_cache_share: float = setting(
        "share of the KV blocks that states of recurrent layers may take in the prefix cache, in "
        "[0, 1]. They take the place of cached keys and values, and never that of running requests",
        0.5,
    )
    state_save_interval: int | None = setting(
        "also save states of recurrent layers at multiples of this number of tokens, rounded up to "
        "whole blocks, for prompts that share a beginning of any length; each takes one more step. "
        "Off if left out",
        None,
    )
    disable_hybrid_kv_cache_manager: bool = setting(
        "keep all KV blocks of sliding-window layers, so that all layers share one block table: "
        "less work for the scheduler, but more memory",
        False,
    )
    num_gpu_blocks_override: int | None = setting(
        "number of KV blocks, instead of measuring memory", None
    )
    gpu_memory_utilization: float = setting(
        "share of the device's memory for weights, activations and KV cache", 0.9
    )
    cpu_kv_cache_bytes: int | None = setting(
        "KV cache size in bytes on the CPU; if left out, as much as is useful, up to half of the "
        "memory that is free after the weights are loaded: docs/guide/tuning.md has the rule",
        None,
    )
    prefix_caching_seed: str | None = setting(
        "fixed seed of block hashes; random for each engine if left out", None, is_secret=True
    )
    prefix_caching_hash_algo: PrefixCachingHashAlgo = setting(
        "hash of block contents: sha256; sha256_cbor, which other programs can compute; or xxhash, "
        "which is faster, but not safe against prompts made to collide",
        "sha256",
    )
    kv_events_config: str | None = setting(
        "JSON object: publish over ZeroMQ which KV blocks enter and leave the prefix cache, as in "
        '{"endpoint": "tcp://127.0.0.1:5557", "replay_endpoint": "tcp://127.0.0.1:5558"}; '
        "other keys: publisher (zmq or null), buffer_steps, hwm, max_queue_size, topic, "
        "wire_format (vllm-0.16 or vllm-0.32), block_hash_type (int or bytes), data_parallel_rank. "
        "Every program that can reach the endpoint can read the events, which contain prompts' "
        "token ids. No events if left out",
        None,
    )
    kv_cache_metrics_sample: float = setting(
        "share of blocks whose lifetime, idle time and reuse gaps are measured, in [0, 1]", 0.01
    )

    def __post_init__(self) -> None:
        one_of("kv_cache_dtype", self.kv_cache_dtype, KVCacheDtype.__args__)
        one_of("mamba_cache_dtype", self.mamba_cache_dtype, KVCacheDtype.__args__)
        one_of("mamba_ssm_cache_dtype", self.mamba_ssm_cache_dtype, KVCacheDtype.__args__)
        true_or_false("enable_prefix_caching", self.enable_prefix_caching)
        true_or_false("disable_hybrid_kv_cache_manager", self.disable_hybrid_kv_cache_manager)
        # A float 16.0 equals 16, but would turn block numbers into floats.
        is_known = type(self.block_size) is int and self.block_size in (8, 16, 32, 64, 128, 256)
        if self.block_size is not None and not is_known:
            raise ConfigError(
                f"block_size must be 8, 16, 32, 64, 128 or 256, got {self.block_size!r}."
            )
        one_of(
            "prefix_caching_hash_algo",
            self.prefix_caching_hash_algo,
            PrefixCachingHashAlgo.__args__,
        )
        if not (is_number(self.kv_cache_metrics_sample) and 0 <= self.kv_cache_metrics_sample <= 1):
            raise ConfigError(
                f"kv_cache_metrics_sample must be in [0, 1], got {self.kv_cache_metrics_sample!r}."
            )
        if not (is_number(self.state_cache_share) and 0 <= self.state_cache_share <= 1):
            raise ConfigError(
                f"state_cache_share must be in [0, 1], got {self.state_cache_share!r}."
            )
        if self.kv_events is not None and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_events_config is set, but without enable_prefix_caching there are no events. "
                "Leave one of them out."
            )
        at_least("state_save_interval", self.state_save_interval, 1)
        at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        at_least("cpu_kv_cache_bytes", self.cpu_kv_cache_bytes, 1)
        if not (is_number(self.gpu_memory_utilization) and 0 < self.gpu_memory_utilization <= 1):
            raise ConfigError(
                f"gpu_memory_utilization must be in (0, 1], got {self.gpu_memory_utilization!r}."
            )

    @property
    def kv_events(self) -> KVEventsConfig | None:
        """`kv_events_config` as settings; None if no events are published.

        Raises:
            ConfigError: It is invalid. Construction checks this.
        """
        if self.kv_events_config is None:
            return None
        events = KVEventsConfig.from_json(self.kv_events_config)
        is_wanted = events.enable_kv_cache_events and events.publisher != "null"
        return events if is_wanted else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """The limits and policies of the scheduler."""

    max_num_seqs: int = setting("largest number of requests that run at the same time", 64)
    max_num_batched_tokens: int = setting(
        "token budget of a step, prefill and decode together", 512
    )
    enable_chunked_prefill: bool = setting(
        "split a prompt over several steps if it exceeds the token budget", True
    )
    long_prefill_token_threshold: int = setting(
        "largest number of tokens of one request in one step; 0 is no limit", 0
    )
    policy: SchedulerPolicy = setting(
        "order of waiting requests: by arrival, or by priority (lower first), then arrival",
        "fcfs",
        aliases=("--scheduling-policy",),
    )
    full_sequence_must_fit: bool = setting(
        "admit a request only if its whole prompt fits into the free KV blocks, and not only its "
        "first part; without it, more requests start, and more are preempted",
        True,
        aliases=("--scheduler-reserve-full-isl",),
    )
    # Hidden until a model with an encoder can be served.
    max_num_encoder_input_tokens: int = setting(
        "encoder tokens, of images for example, that one step may compute", 2048, is_hidden=True
    )
    encoder_cache_size: int = setting("encoder tokens whose outputs are kept", 2048, is_hidden=True)
    async_scheduling: bool = setting(
        "decide the next step while the device computes the current one; this does not change "
        "answers",
        True,
    )
    max_decode_burst: int = setting(
        "largest number of decode steps that the device computes without the host, while no "
        "request waits; the engine uses fewer while requests arrive, and if clients would receive "
        "tokens in bursts",
        8,
    )
    trace_file: str | None = setting(
        "write every arrival, decision and block movement to this file, one JSON line per step, "
        "for `python -m paxkv.replay`",
        None,
    )

    def __post_init__(self) -> None:
        true_or_false("enable_chunked_prefill", self.enable_chunked_prefill)
        true_or_false("full_sequence_must_fit", self.full_sequence_must_fit)
        true_or_false("async_scheduling", self.async_scheduling)
        at_least("max_decode_burst", self.max_decode_burst, 1)
        if self.max_decode_burst > MAX_DECODE_BURST:
            raise ConfigError(
                f"max_decode_burst must be at most {MAX_DECODE_BURST}, got "
                f"{self.max_decode_burst}: longer bursts gain nothing, and every step of a burst "
                "needs memory for its result."
            )
        at_least("max_num_encoder_input_tokens", self.max_num_encoder_input_tokens, 0)
        at_least("encoder_cache_size", self.encoder_cache_size, 0)
        at_least("max_num_seqs", self.max_num_seqs, 1)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        one_of("policy", self.policy, SchedulerPolicy.__args__)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} must be at least "
                f"max_num_seqs={self.max_num_seqs}: every running request needs a token per step."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunnerConfig:
    """Settings for the computation of steps on the device."""

    kernels: Kernels = setting(
        "implementation of operations on the KV cache: auto is the kernels written for this "
        "device, if there are any and they reproduce XLA's results at the start; xla is plain XLA, "
        "which runs everywhere",
        "auto",
    )
    batch_invariant: bool = setting(
        "compute bit-identical results for a request, regardless of other requests in the batch, "
        "and of whether its tokens are cached, split over steps or computed again. Every step is "
        "computed in tiles of 32 tokens, without bursts, which takes longer",
        False,
    )
    max_logprobs: int = setting(
        "largest number of log-probabilities per position that a request may ask for; -1 is the "
        "whole vocabulary. More than 20 are selected on the host: for such a request the logits "
        "are copied to the host in every step, and programs for prompts hold the logits of all "
        "tokens",
        MAX_LOGPROBS,
    )
    check_logits: bool = setting(
        "count requests whose logits are NaN or infinite, as vllm:corrupted_requests_total; every "
        "step then computes log-probabilities, which takes longer",
        False,
    )
    expert_load_window: float | None = setting(
        "for models with experts: count how many tokens go to each expert, in windows of this many "
        "seconds. Each window is logged and added to paxkv:expert_tokens_total. If left out, "
        "nothing is counted",
        None,
    )
    speculative_config: SpeculativeConfig | None = setting(
        'JSON object: speculative decoding, as in {"method": "ngram", "num_speculative_tokens": 4, '
        '"prompt_lookup_min": 2, "prompt_lookup_max": 4}. A drafter proposes the next tokens of a '
        "request, and one step verifies them all. This does not change answers. The method suffix "
        "proposes tokens from finished answers too. The method mtp "
        "runs the layer for multi-token prediction of DeepSeek V3 and GLM-4.5. The methods eagle3 "
        "and draft_model run the EAGLE-3 head or the smaller model in the field model. No drafts "
        "if left out",
        None,
        aliases=("-sc",),
    )
    enable_compilation_cache: bool = setting(
        "keep compiled programs in a folder, so that the next start with the same model, settings, "
        "device and versions loads them instead of compiling",
        True,
    )
    compilation_cache_dir: str | None = setting(
        "folder of compiled programs. Other users must not be able to write to it, because its "
        "contents are executed. If left out: paxkv in JAX_COMPILATION_CACHE_DIR if that is set, or "
        "else paxkv/compiled in the user's cache folder, ~/.cache or XDG_CACHE_HOME",
        None,
    )
    compiled_dir: str | None = setting(
        "folder that `python -m paxkv.compile` wrote. The engine loads its programs and compiles "
        "none. It does not start if they are not for this model, these settings, this device and "
        "these versions. The contents are executed, so use only folders from people you trust",
        None,
    )

    def __post_init__(self) -> None:
        one_of("kernels", self.kernels, Kernels.__args__)
        true_or_false("batch_invariant", self.batch_invariant)
        if self.max_logprobs != -1 or isinstance(self.max_logprobs, bool):
            at_least("max_logprobs", self.max_logprobs, 0)
        window_s = self.expert_load_window
        if window_s is not None and not (
            is_number(window_s) and 0 < window_s <= MAX_EXPERT_LOAD_WINDOW_S
        ):
            raise ConfigError(
                "expert_load_window must be a number of seconds above 0 and at most "
                f"{MAX_EXPERT_LOAD_WINDOW_S}, got {window_s!r}. Leave it out to count nothing."
            )
        speculative = self.speculative_config
        if speculative is not None and not isinstance(speculative, SpeculativeConfig):
            raise ConfigError(
                f"speculative_config must be a SpeculativeConfig, got {speculative!r}."
            )
        true_or_false("enable_compilation_cache", self.enable_compilation_cache)
        if self.compilation_cache_dir is not None and not self.enable_compilation_cache:
            raise ConfigError(
                f"compilation_cache_dir={self.compilation_cache_dir!r} is set, but "
                "enable_compilation_cache is off. Leave one of them out."
            )
        if self.compilation_cache_dir is not None and self.compiled_dir is not None:
            raise ConfigError(
                f"compiled_dir={self.compiled_dir!r} and compilation_cache_dir="
                f"{self.compilation_cache_dir!r} are both set, but nothing is compiled with "
                "compiled_dir. Leave one of them out."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The number of engines, and of devices of each."""

    tensor_parallel_size: int = setting(
        "number of devices of an engine. Each has a part of every layer and of the KV cache, so "
        "larger models and more requests fit: docs/guide/several-devices.md",
        1,
        aliases=("-tp",),
    )
    enable_expert_parallel: bool = setting(
        "give each device its own experts, instead of a part of each expert. The number of experts "
        "must be a multiple of --tensor-parallel-size",
        False,
        aliases=("-ep",),
    )
    decode_context_parallel_size: int = setting(
        "number of neighboring devices that share the positions of each request, where each would "
        "otherwise have a copy of all: latents, or KV heads if there are fewer than devices. It "
        "must divide --tensor-parallel-size: docs/guide/several-devices.md",
        1,
        aliases=("-dcp",),
    )
    data_parallel_size: int = setting(
        "number of engines that share the requests. Each is a process with its own weights and KV "
        "cache, so other limits and sizes apply to each engine. On an NVIDIA machine each engine "
        "has --tensor-parallel-size GPUs; without GPUs, an equal part of the processor cores",
        1,
        aliases=("-dp",),
    )

    nnodes: int = setting(
        "number of hosts of an engine, which share its --tensor-parallel-size devices equally. Run "
        "the command with the same flags on each host: docs/guide/several-devices.md",
        1,
        aliases=("-n",),
    )
    node_rank: int = setting(
        "number of this host. Host 0 serves requests; the others compute with it",
        0,
        aliases=("-r",),
    )
    master_addr: str = setting(
        "address of host 0 in the network of the hosts. The network must be private, because the "
        "hosts send tokens unencrypted",
        "127.0.0.1",
    )
    master_port: int = setting(
        "port of host 0 for the other hosts. Each start uses two more free ports of host 0", 29501
    )
    distributed_timeout_seconds: int = setting(
        "longest time that the hosts of an engine wait for each other while they start", 600
    )

    def __post_init__(self) -> None:
        at_least("tensor_parallel_size", self.tensor_parallel_size, 1)
        at_least("decode_context_parallel_size", self.decode_context_parallel_size, 1)
        if self.tensor_parallel_size % self.decode_context_parallel_size:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} must divide "
                f"tensor_parallel_size={self.tensor_parallel_size}. Its devices are some of these."
            )
        if self.nnodes > 1 and self.decode_context_parallel_size > 1:
            raise ConfigError(
                f"decode_context_parallel_size={self.decode_context_parallel_size} does not work "
                f"with nnodes={self.nnodes} yet. Leave it out."
            )
        at_least("data_parallel_size", self.data_parallel_size, 1)
        at_least("nnodes", self.nnodes, 1)
        at_least("node_rank", self.node_rank, 0)
        at_least("master_port", self.master_port, 1)
        if self.master_port > 65535:
            raise ConfigError(f"master_port must be at most 65535, got {self.master_port}.")
        at_least("distributed_timeout_seconds", self.distributed_timeout_seconds, 1)
        if self.node_rank >= self.nnodes:
            raise ConfigError(
                f"node_rank must be below nnodes={self.nnodes}, got {self.node_rank}. Hosts are "
                "numbered from 0."
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"tensor_parallel_size={self.tensor_parallel_size} is not a multiple of "
                f"nnodes={self.nnodes}. Each host has the same number of devices."
            )
        if self.nnodes > 1 and self.data_parallel_size > 1:
            raise ConfigError(
                f"data_parallel_size={self.data_parallel_size} does not work with "
                f"nnodes={self.nnodes} yet. Start a server for each engine."
            )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """All settings of an engine."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    cache: CacheConfig = dataclasses.field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = dataclasses.field(default_factory=SchedulerConfig)
    runner: RunnerConfig = dataclasses.field(default_factory=RunnerConfig)
    parallel: ParallelConfig = dataclasses.field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        speculative = self.runner.speculative_config
        if speculative is not None and self.model.model is not None:
            speculative.check_has_model()
        if speculative is not None and speculative.drafts_in_bursts:
            why_none = None
            if self.runner.batch_invariant:
                why_none = "batch_invariant"
            elif self.scheduler.max_decode_burst == 1:
                why_none = "max_decode_burst=1"
            if why_none is not None:
                raise ConfigError(
                    f"speculative_config: drafts_in_bursts needs bursts, and {why_none} prevents "
                    "them. Leave one of them out."
                )
            most = self.scheduler.max_num_batched_tokens
            num_rows = 1 + speculative.num_speculative_tokens
            if num_rows > most:
                raise ConfigError(
                    f"speculative_config: with drafts_in_bursts, a step computes {num_rows} tokens "
                    "of a request (1 + num_speculative_tokens), and max_num_batched_tokens is "
                    f"{most}. Set a larger max_num_batched_tokens, or use fewer drafts."
                )
        num_ranks = self.parallel.decode_context_parallel_size
        for name, is_set in (
            ("speculative_config", speculative is not None),
            ("batch_invariant", self.runner.batch_invariant),
        ):
            if num_ranks > 1 and is_set:
                raise ConfigError(
                    f"{name} does not work with decode_context_parallel_size={num_ranks} yet. "
                    "Leave one of them out."
                )
        num_hosts = self.parallel.nnodes
        if num_hosts > 1 and self.runner.expert_load_window is not None:
            raise ConfigError(
                f"expert_load_window does not work with nnodes={num_hosts} yet. Leave it out."
            )
        most = self.runner.max_logprobs
        if num_hosts > 1 and not 0 <= most <= MAX_LOGPROBS:
            raise ConfigError(
                f"max_logprobs={most} does not work with nnodes={num_hosts} yet, because each host "
                f"has a part of the logits. Use at most {MAX_LOGPROBS}."
            )


def _model_impl(value: object) -> None:
    """Checks only the format; the process that loads the model imports the module."""
    module, _, class_name = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if value != AUTO_MODEL_IMPL and not (module and class_name.isidentifier()):
        raise ConfigError(
            f"model_impl must be {AUTO_MODEL_IMPL}, module:Class such as my_model:MyModel, or "
            f"path/to/file.py:Class, got {value!r}. With {AUTO_MODEL_IMPL}, paxkv's own class for "
            "the architecture runs the model; there are no other implementations."
        )


def _zmq_endpoint(name: str, value: object) -> None:
    if not (isinstance(value, str) and value.startswith(("tcp://", "ipc://"))):
        raise ConfigError(
            f"{name} must be a ZeroMQ address such as tcp://127.0.0.1:5557 or ipc:///run/events, "
            f"got {value!r}."
        )
    port = value.rpartition(":")[2]
    # ZeroMQ would read port 99999 as 34463. "*" means any free port, like 0.
    is_port = port == "*" or (port.isdecimal() and int(port) <= 65535)
    if value.startswith("tcp://") and not is_port:
        raise ConfigError(f"{name} must end in a port in [0, 65535], got {value!r}.")
