"""vLLM's flags that paxkv does not have: which of them it ignores, and which it refuses.

They may be flags of a command line or arguments of `LLM()`. paxkv ignores a flag only if no answer,
no memory limit and no access depends on it.
"""

import dataclasses
import json
from collections.abc import Mapping
from typing import Literal

Verdict = Literal["neutral", "ignored", "refused"]
NumValues = Literal[0, 1, "?", "+"]
_PYTHON_WORDS: Mapping[str, bool | None] = {"None": None, "True": True, "False": False}


@dataclasses.dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM.

    Args:
        names: The long name first, then vLLM's short names.
        reason: Part of a message: why paxkv does not have the flag, or what to use instead.
        num_values: Number of values after the flag; "+" is one or more, "?" is none or one. A flag
            with 0 is a switch, and also exists with "--no-".
        is_refused: Whether values that are not neutral end the program. Otherwise they are ignored
            with a warning.
        neutral: Values that match paxkv's behavior, so they are accepted.
    """

    names: tuple[str, ...]
    reason: str
    num_values: NumValues = 1
    is_refused: bool = False
    neutral: tuple[object, ...] = ()

    def verdict(self, value: object) -> Verdict:
        """Judges a value, which may be a Python object or a word of a command line.

        None is neutral, because it leaves the choice to the engine.
        """
        if value is None or self._is_neutral(value):
            return "neutral"
        return "refused" if self.is_refused else "ignored"

    def _is_neutral(self, value: object) -> bool:
        if self.num_values == "+" and isinstance(value, (list, tuple)):
            return all(self._is_neutral(item) for item in value)
        plain = plain_value(value)
        return plain is None or any(_is_same(plain, neutral) for neutral in self.neutral)


def plain_value(value: object) -> object:
    """The value that a word of a command line spells in JSON or Python.

    "0" -> 0, "{}" -> {}, "auto" -> "auto", "None" -> None, "true" and "True" -> True.
    """
    if not isinstance(value, str):
        return value
    if value in _PYTHON_WORDS:
        return _PYTHON_WORDS[value]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def accepted_values(flag: VllmFlag) -> list[str]:
    """The neutral values as words of a command line; "on" and "off" for a switch."""
    if flag.num_values == 0:
        return ["on" if value else "off" for value in flag.neutral]
    words = [value if isinstance(value, str) else json.dumps(value) for value in flag.neutral]
    return [word or '""' for word in words]


def _is_same(value: object, neutral: object) -> bool:
    # In Python True == 1, but `pipeline_parallel_size=True` does not mean one stage.
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)


def _names(names: str) -> list[tuple[str, ...]]:
    """ "--a, -b --c" -> [("--a", "-b"), ("--c",)]."""
    groups = names.replace(",", "").replace(" --", "\n--").split("\n")
    return [tuple(group.split()) for group in groups]


def _ignored(
    reason: str, names: str, *neutral: object, num_values: NumValues = 1
) -> list[VllmFlag]:
    return [VllmFlag(n, reason, num_values, False, neutral) for n in _names(names)]


def _refused(
    reason: str, names: str, *neutral: object, num_values: NumValues = 1
) -> list[VllmFlag]:
    return [VllmFlag(n, reason, num_values, True, neutral) for n in _names(names)]


def _ignored_switches(reason: str, names: str, *neutral: bool) -> list[VllmFlag]:
    return _ignored(reason, names, *(neutral or (False,)), num_values=0)


def _refused_switches(reason: str, names: str) -> list[VllmFlag]:
    return _refused(reason, names, False, num_values=0)


_SPLIT_BY_LAYER = (
    "the devices of an engine each compute a part of every layer (--tensor-parallel-size); "
    "--data-parallel-size starts several engines"
)
_TAKE_TURNS = (
    "of the positions of a request, each device of --decode-context-parallel-size has one in turn"
)
_HOST_RANK = "host 0 serves requests and the others do not: see --node-rank"
_ONE_MACHINE = "all engines run on one machine and share its port; use --data-parallel-size"
_COMPILED = "all steps run as programs that XLA compiles before the port opens"
_KERNELS = "use --kernels instead"
_NO_CLASSES = "paxkv loads no code that a flag names"
_NO_REMOTE_CODE = "code from a checkpoint is never run"
_CHECKPOINT = "paxkv follows the checkpoint and has no flag to override it"
_HUGGING_FACE = "paxkv reads only checkpoints in the format of Hugging Face"
_NO_MULTIMODAL = "only text models are supported"
_FIXED_EXPERTS = (
    "with --enable-expert-parallel, each device has neighboring experts, and keeps them"
)
_NO_MAMBA = "states of Mamba layers have no such setting"
_NO_LORA = "LoRA adapters are not supported"
_NO_QUANTIZATION = "the format of quantized weights is read from config.json"
_DRAFT_METRICS = "answers contain no numbers of drafts"
_NO_TRANSFER = "KV cache transfer is not supported"
_NO_OFFLOADING = "KV cache offloading is not supported"
_ON_DEVICE = "weights stay on the device"
_NO_SLEEP = "sleep mode is not supported"
_PARTIAL_PREFILLS = "paxkv has no such limit; 1 is accepted because it is vLLM's default"
_LOGS = "the log has a fixed format and goes to stderr; it never contains prompts or answers"
_NO_TRACES = "no traces are exported"
_NO_POOLING = "models only generate text"
_NO_WATERMARK = "watermarks are not supported"
_NO_FAULT_TOLERANCE = "the server restarts engines that died; see --max-engine-restarts"

VLLM_FLAGS: tuple[VllmFlag, ...] = (
    # Devices and machines.
    *_refused(_SPLIT_BY_LAYER, "--pipeline-parallel-size, -pp", 1),
    *_refused(_SPLIT_BY_LAYER, "--prefill-context-parallel-size, -pcp", 1),
    *_refused_switches(_HOST_RANK, "--headless"),
    *_refused(_SPLIT_BY_LAYER, "--device-ids"),
    *_ignored(_SPLIT_BY_LAYER, "--distributed-executor-backend", "uni"),
    *_ignored(_SPLIT_BY_LAYER, "--max-parallel-loading-workers"),
    *_ignored(_SPLIT_BY_LAYER, "--cpu-distributed-timeout-seconds --dcp-comm-backend"),
    *_ignored(_TAKE_TURNS, "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", 1),
    *_ignored(_SPLIT_BY_LAYER, "--all2all-backend", "allgather_reducescatter"),
    *_ignored(_SPLIT_BY_LAYER, "--ubatch-size --dbo-decode-token-threshold", 0),
    *_ignored(_SPLIT_BY_LAYER, "--dbo-prefill-token-threshold"),
    *_ignored_switches(
        _SPLIT_BY_LAYER, "--disable-custom-all-reduce --enable-dbo --dcp-q-replicate"
    ),
    *_ignored_switches(_SPLIT_BY_LAYER, "--disable-nccl-for-dp-synchronization"),
    *_ignored_switches(_SPLIT_BY_LAYER, "--enable-nccl-comm-suspend --ray-workers-use-nsight"),
    *_ignored_switches(_SPLIT_BY_LAYER, "--enable-batch-sharded-sampling --enable-hc-sp"),
    *_ignored(_SPLIT_BY_LAYER, "--numa-bind-cpus --numa-bind-nodes", num_values="+"),
    *_ignored_switches(_SPLIT_BY_LAYER, "--numa-bind"),
    *_refused(_ONE_MACHINE, "--data-parallel-size-local, -dpl --data-parallel-rank, -dpn"),
    *_refused(_ONE_MACHINE, "--data-parallel-start-rank, -dpr", 0),
    *_refused(_ONE_MACHINE, "--data-parallel-address, -dpa", "127.0.0.1", "localhost"),
    *_refused(_ONE_MACHINE, "--data-parallel-backend, -dpb", "mp"),
    *_refused_switches(_ONE_MACHINE, "--data-parallel-hybrid-lb, -dph"),
    *_refused_switches(_ONE_MACHINE, "--data-parallel-external-lb, -dpe"),
    *_refused_switches(_ONE_MACHINE, "--data-parallel-multi-port-external-lb"),
    *_ignored(_ONE_MACHINE, "--data-parallel-rpc-port, -dpp --data-parallel-supervisor-port"),
    *_ignored(_ONE_MACHINE, "--dp-sync-interval --dp-supervisor-probe-failure-threshold"),
    *_ignored(_ONE_MACHINE, "--dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s"),
    *_refused("one process serves HTTP", "--api-server-count, -asc", 1),
    *_ignored("one process serves HTTP", "--renderer-num-workers", 1),
    *_ignored_switches(
        "the engine is always a separate process", "--disable-frontend-multiprocessing"
    ),
    *_refused_switches("the number of engines is fixed", "--enable-elastic-ep --enable-scale-out"),
    *_ignored("the number of engines is fixed", "--elastic-ep-max-dp-size"),
    *_refused_switches(_NO_FAULT_TOLERANCE, "--enable-fault-tolerance"),
    *_refused(_NO_FAULT_TOLERANCE, "--fault-tolerance-config", {}),
    # Programs and kernels.
    *_ignored_switches(_COMPILED, "--enforce-eager --cudagraph-metrics"),
    *_ignored(_COMPILED, "--compilation-config, -cc", {}),
    *_ignored(_COMPILED, "--max-seq-len-to-capture --optimization-level, -O"),
    *_ignored(_COMPILED, "--max-cudagraph-capture-size --performance-mode --ir-op-priority"),
    *_ignored(_COMPILED, "--cudagraph-capture-sizes", num_values="+"),
    *_ignored(_COMPILED, "--jit-monitor-mode"),
    *_ignored_switches(_COMPILED, "--jit-monitor-verbose"),
    *_ignored(_KERNELS, "--attention-config, -ac --kernel-config", {}),
    *_ignored(_KERNELS, "--attention-backend --moe-backend", "auto"),
    *_ignored(_KERNELS, "--linear-backend --gdn-prefill-backend"),
    *_ignored(_KERNELS, "--kda-decode-backend --kda-prefill-backend"),
    *_ignored(_KERNELS, "--sparse-indexer-topk-backend --monokernel"),
    *_ignored_switches(_KERNELS, "--enable-flashinfer-autotune"),
    *_ignored_switches("paxkv has no cascade attention", "--disable-cascade-attn"),
    *_refused("attention computes in the precision of --dtype", "--override-attention-dtype"),
    *_refused_switches("all layers compute all tokens of a prompt", "--kv-sharing-fast-prefill"),
    *_refused_switches("tokens are sampled in 32 bits", "--use-fp64-gumbel"),
    # Experts.
    *_ignored_switches(_FIXED_EXPERTS, "--enable-eplb"),
    *_ignored_switches(_FIXED_EXPERTS, "--enable-ep-weight-filter"),
    *_ignored(_FIXED_EXPERTS, "--eplb-config", {}),
    *_ignored(_FIXED_EXPERTS, "--expert-placement-strategy", "linear"),
    *_refused_switches(
        "answers do not name the experts of their tokens", "--enable-return-routed-experts"
    ),
    # Kinds of models that are not supported, or have no such settings.
    *_ignored(_NO_MAMBA, "--mamba-block-size --mamba-cache-mode --mamba-backend"),
    *_ignored(_NO_MAMBA, "--mamba-cache-philox-rounds --mamba-ssu-algorithm"),
    *_ignored(_NO_MAMBA, "--replayssm-buffer-len"),
    *_ignored_switches(_NO_MAMBA, "--enable-mamba-cache-stochastic-rounding --use-replayssm"),
    *_ignored_switches(_NO_MAMBA, "--enable-mamba-shared-prefix-checkpoint"),
    *_ignored(_NO_MULTIMODAL, "--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs", {}),
    *_ignored(_NO_MULTIMODAL, "--mm-processor-cache-gb --mm-shm-cache-max-object-size-mb"),
    *_ignored(_NO_MULTIMODAL, "--mm-processor-cache-type --mm-encoder-tp-mode"),
    *_ignored(_NO_MULTIMODAL, "--mm-encoder-attn-backend --mm-encoder-attn-dtype"),
    *_ignored(_NO_MULTIMODAL, "--mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path"),
    *_ignored(_NO_MULTIMODAL, "--mm-encoder-fp8-scale-save-margin --mm-hasher-algorithm"),
    *_ignored(_NO_MULTIMODAL, "--mm-ipc-gpu-memory-gb --mm-processor-device --mm-tensor-ipc"),
    *_ignored(_NO_MULTIMODAL, "--video-pruning-rate --video-pruning-method"),
    *_ignored(_NO_MULTIMODAL, "--allowed-local-media-path", ""),
    *_ignored(_NO_MULTIMODAL, "--allowed-media-domains", num_values="+"),
    *_ignored_switches(_NO_MULTIMODAL, "--disable-chunked-mm-input --interleave-mm-strings"),
    *_ignored_switches(_NO_MULTIMODAL, "--skip-mm-profiling --mm-device-do-normalize"),
    *_ignored_switches(_NO_MULTIMODAL, "--trust-request-mm-kwargs --enable-shm-tensor-arena"),
    *_ignored_switches(_NO_MULTIMODAL, "--enable-flash-late-interaction"),
    *_ignored_switches(_NO_MULTIMODAL, "--language-model-only", True, False),
    *_refused_switches(_NO_MULTIMODAL, "--enable-mm-embeds --mm-encoder-only"),
    *_refused("models take only text, so there is no encoder cache", "--ec-transfer-config", {}),
    *_refused("models take only text, so there is no encoder cache", "--ec-manager-config", {}),
    *_refused(_NO_POOLING, "--pooler-config --diffusion-config --engram-config", {}),
    *_refused(_NO_POOLING, "--aux-output-config", {}),
    *_refused(_NO_POOLING, "--runner --task", "auto", "generate"),
    *_refused(_NO_POOLING, "--convert", "auto", "none"),
    *_refused("paxkv has one implementation of each model", "--model-class-overrides", {}),
    # Checkpoints.
    *_refused(_HUGGING_FACE, "--tokenizer-mode --config-format", "auto", "hf"),
    *_refused(_CHECKPOINT, "--hf-config-path"),
    *_refused(_CHECKPOINT, "--hf-overrides --model-loader-extra-config", {}),
    *_refused_switches(_CHECKPOINT, "--disable-sliding-window --skip-tokenizer-init"),
    *_ignored_switches(_NO_REMOTE_CODE, "--trust-remote-code"),
    *_ignored(_NO_REMOTE_CODE, "--code-revision"),
    *_ignored("set HF_HOME instead", "--download-dir"),
    *_ignored("only the needed files are downloaded", "--ignore-patterns", num_values="+"),
    *_ignored(
        "a terminal shows a progress bar, other outputs do not",
        "--use-tqdm-on-load",
        False,
        num_values=0,
    ),
    *_ignored("weights are read from safetensors files", "--pt-load-map-location", "cpu"),
    *_ignored("weights are read from safetensors files", "--safetensors-load-strategy", "lazy"),
    *_ignored(
        "weights are read from safetensors files",
        "--safetensors-prefetch-block-size --safetensors-prefetch-num-threads",
    ),
    *_refused("weights do not change while the engine runs", "--weight-transfer-config", {}),
    # Quantization, adapters, speculation.
    *_refused("use --quantization instead", "-q"),
    *_refused(_NO_QUANTIZATION, "--quantization-config", {}),
    *_ignored_switches(_NO_QUANTIZATION, "--allow-deprecated-quantization"),
    *_ignored_switches("the KV cache is never stored in 8 bits", "--calculate-kv-scales"),
    *_ignored(
        "the KV cache is never stored in 8 bits", "--kv-cache-dtype-skip-layers", num_values="+"
    ),
    *_refused_switches(_NO_LORA, "--enable-lora --fully-sharded-loras --specialize-active-lora"),
    *_refused_switches(_NO_LORA, "--enable-tower-connector-lora --enable-mixed-moe-lora-format"),
    *_refused_switches(_NO_LORA, "--enable-moe-shared-loras"),
    *_refused(_NO_LORA, "--lora-modules --lora-target-modules", num_values="+"),
    *_refused(_NO_LORA, "--default-mm-loras", {}),
    *_refused(_NO_LORA, "--lora-dtype", "auto"),
    *_refused(_NO_LORA, "--max-lora-rank", 16),
    *_refused(_NO_LORA, "--max-loras", 1),
    *_refused(_NO_LORA, "--max-cpu-loras --max-lora-cls-labels"),
    *_refused("use --speculative-config instead", "--spec-method --spec-model --spec-tokens"),
    *_refused_switches(_DRAFT_METRICS, "--per-request-spec-decode-metrics"),
    # Memory.
    *_refused(
        "use --num-gpu-blocks-override, or --cpu-kv-cache-bytes on the CPU",
        "--kv-cache-memory-bytes",
    ),
    *_ignored("preempted requests are computed again, not swapped", "--swap-space", 0, 4),
    *_refused(_ON_DEVICE, "--cpu-offload-gb --offload-group-size --offload-num-in-group", 0),
    *_refused(_ON_DEVICE, "--cpu-offload-params --offload-params", num_values="+"),
    *_refused(_ON_DEVICE, "--offload-backend", "auto"),
    *_ignored(_ON_DEVICE, "--offload-prefetch-step"),
    *_refused(_NO_TRANSFER, "--kv-transfer-config", {}),
    *_refused(_NO_OFFLOADING, "--kv-offloading-size", 0),
    *_refused(_NO_OFFLOADING, "--kv-offloading-backend", "native"),
    *_refused_switches(_NO_SLEEP, "--enable-sleep-mode --enable-cumem-allocator"),
    *_refused_switches(_NO_SLEEP, "--sleep-mode-offload-cudagraph"),
    *_refused(_NO_SLEEP, "--sleep-preserve-parameter-names", num_values="+"),
    *_refused("use --gpu-memory-utilization", "--device-memory-utilization"),
    *_refused("the prefix cache evicts the least recently used blocks", "--prefix-match-unit"),
    *_refused(
        "the prefix cache evicts the least recently used blocks",
        "--prefix-cache-retention-interval",
    ),
    *_refused_switches("paxkv has no such mode", "--swa-bounded-replay"),
    # Scheduling.
    *_refused(_PARTIAL_PREFILLS, "--max-num-partial-prefills --max-long-partial-prefills", 1),
    *_refused("use --max-num-batched-tokens", "--max-num-scheduled-tokens"),
    *_refused("use --max-num-seqs", "--max-num-active-seqs"),
    *_refused("use --max-num-queued-reqs", "--max-num-queued-tokens"),
    *_refused("use --long-prefill-token-threshold", "--long-prefill-token-threshold-adaptive"),
    *_refused("prompts may be scheduled in every step", "--prefill-schedule-interval", 1),
    # Code that a flag names.
    *_refused(_NO_CLASSES, "--scheduler-cls --middleware --io-processor-plugin"),
    *_refused(_NO_CLASSES, "--worker-cls", "auto"),
    *_refused(_NO_CLASSES, "--worker-extension-cls", ""),
    *_refused(_NO_CLASSES, "--reasoning-parser-plugin --tool-parser-plugin", ""),
    *_refused(_NO_CLASSES, "--logits-processors", num_values="+"),
    *_refused(_NO_CLASSES, "--logits-processor-pattern"),
    *_refused("paxkv has no plug-ins that would read it", "--additional-config", {}),
    # Answers.
    *_refused("log-probabilities are always raw", "--logprobs-mode", "raw_logprobs"),
    *_refused("answers have the role assistant", "--response-role", "assistant"),
    *_refused_switches("prompts are text or token ids", "--enable-prompt-embeds --tokens-only"),
    *_refused_switches(
        "set return_tokens_as_token_ids in requests", "--return-tokens-as-token-ids"
    ),
    *_refused("the server runs no tools itself; clients run them", "--tool-server"),
    *_refused("tool calls are parsed as --tool-call-parser says", "--tool-strict-level"),
    *_refused("use --reasoning-parser", "--reasoning-config", {}),
    *_refused_switches("use --reasoning-parser", "--cohere-is-reasoning-model"),
    *_refused("Cohere's API is not supported", "--cohere-format"),
    *_refused(
        "/v1/messages passes disabled thinking to chat templates as enable_thinking",
        "--anthropic-disabled-thinking-effort",
    ),
    *_refused_switches("answers contain no sampling masks", "--return-sampling-mask"),
    *_refused_switches("answers contain no metrics; see /metrics", "--enable-per-request-metrics"),
    *_refused(_NO_WATERMARK, "--watermark"),
    *_refused(_NO_WATERMARK, "--watermark-config", {}),
    *_ignored_switches(
        "usage always contains prompt_tokens_details", "--enable-prompt-tokens-details"
    ),
    *_ignored_switches("every answer has an X-Request-Id", "--enable-request-id-headers"),
    # Access.
    *_refused("paxkv listens only on a network address: use --host and --port", "--uds"),
    *_refused_switches("gRPC is not supported", "--grpc"),
    *_refused("gRPC is not supported", "--grpc-port"),
    *_refused_switches("restart the server to use new certificates", "--enable-ssl-refresh"),
    *_refused("Python's default ciphers are used", "--ssl-ciphers"),
    *_ignored_switches("/load is always available", "--enable-server-load-tracking"),
    *_ignored_switches("paxkv has no documentation page", "--enable-offline-docs"),
    *_ignored("streams have no keep-alive events", "--sse-keep-alive-interval", 0),
    *_refused("answers contain no fingerprint", "--fingerprint-mode --fingerprint-value"),
    *_refused("paxkv has no flag of this name; --help lists all flags", "--args"),
    # Logs, metrics and traces.
    *_ignored_switches(_LOGS, "--disable-log-requests --enable-log-requests"),
    *_ignored_switches(_LOGS, "--enable-log-outputs --enable-log-deltas"),
    *_ignored_switches(_LOGS, "--aggregate-engine-logging --enable-logging-iteration-details"),
    *_ignored(_LOGS, "--max-log-len --uvicorn-log-level --log-config-file --log-level"),
    *_ignored(_LOGS, "--logging-config", {}),
    *_ignored_switches("internal errors are always logged with a traceback", "--log-error-stack"),
    *_ignored_switches(
        "paxkv reads no VLLM_ variables except VLLM_API_KEY", "--fail-on-environ-validation"
    ),
    *_ignored("paxkv hides no metrics", "--show-hidden-metrics-for-version"),
    *_ignored_switches("use --kv-cache-metrics-sample instead", "--kv-cache-metrics"),
    *_ignored_switches("paxkv has no such metrics", "--enable-mfu-metrics"),
    *_ignored("histograms have fixed buckets", "--custom-histogram-buckets", {}),
    *_ignored(_NO_TRACES, "--otlp-traces-endpoint"),
    *_ignored(_NO_TRACES, "--collect-detailed-traces", num_values="+"),
    *_ignored_switches(_NO_TRACES, "--enable-layerwise-nvtx-tracing"),
    *_refused_switches("use --trace-file", "--enable-trace-replay"),
    *_refused("use --profile-dir with --enable-admin instead", "--profiler-config", {}),
)
