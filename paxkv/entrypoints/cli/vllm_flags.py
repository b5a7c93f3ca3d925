"""vLLM's flags that paxkv does not have: what happens to a command line that brings one."""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Literal

_SEEN = "vllm_flags"


@dataclasses.dataclass(frozen=True, slots=True)
class VllmFlag:
    """One flag of vLLM.

    Args:
        names: As vLLM has them, the long one first; with "--no-" too where it takes no value.
        reason: Why it does nothing here, or what to do instead.
        num_values: How many it takes; "+" is one or more.
        accepted: Values that ask for what paxkv does anyway. None: it is for nothing here,
            whatever its value, and is passed over with a warning. Empty: it is refused.
    """

    names: tuple[str, ...]
    reason: str
    num_values: Literal[0, 1, "+"] = 1
    accepted: tuple[str, ...] | None = None


_ONE_DEVICE = (
    "an engine uses one device of one machine, so no work is split over devices; "
    "--data-parallel-size starts several engines"
)
_COMPILED = "all steps run as programs that XLA compiles before the port opens"
_NO_CLASSES = "paxkv loads no classes that a flag names"
_MODEL = "paxkv follows the checkpoint and has no flag to override it"
_HUGGING_FACE = "paxkv reads only checkpoints in the format of Hugging Face"
_NO_MULTIMODAL = "only text models are supported"
_PARTIAL_PREFILLS = "paxkv has no such limit; 1 is accepted because it is vLLM's default"
_LOGS = "the log has a fixed format and goes to stderr; it never contains prompts or answers"


def _ignored(reason: str, *names: str, num_values: Literal[0, 1, "+"] = 1) -> list[VllmFlag]:
    return [VllmFlag((name,), reason, num_values) for name in names]


def _refused(reason: str, *names: str, num_values: Literal[0, 1, "+"] = 1) -> list[VllmFlag]:
    return [VllmFlag((name,), reason, num_values, ()) for name in names]


# A flag is passed over only if no answer and no reachability depends on it.
VLLM_FLAGS: tuple[VllmFlag, ...] = (
    VllmFlag(("--tensor-parallel-size", "-tp"), _ONE_DEVICE, accepted=("1",)),
    VllmFlag(("--pipeline-parallel-size", "-pp"), _ONE_DEVICE, accepted=("1",)),
    VllmFlag(("--decode-context-parallel-size", "-dcp"), _ONE_DEVICE, accepted=("1",)),
    VllmFlag(("--prefill-context-parallel-size", "-pcp"), _ONE_DEVICE, accepted=("1",)),
    VllmFlag(("--api-server-count", "-asc"), "one process serves HTTP", accepted=("1",)),
    *_ignored(_ONE_DEVICE, "--distributed-executor-backend", "--max-parallel-loading-workers"),
    *_ignored(
        _ONE_DEVICE, "--disable-custom-all-reduce", "--enable-expert-parallel", num_values=0
    ),
    *_refused(_ONE_DEVICE, "--nnodes", "--node-rank", "--master-addr", "--master-port"),
    *_refused(_ONE_DEVICE, "--headless", num_values=0),
    *_ignored(_COMPILED, "--enforce-eager", num_values=0),
    *_ignored(_COMPILED, "--compilation-config", "--max-seq-len-to-capture"),
    *_ignored(_COMPILED, "--optimization-level", "--cudagraph-capture-sizes"),
    *_ignored("preempted requests are computed again, not swapped", "--swap-space"),
    *_ignored("code from a checkpoint is never run", "--trust-remote-code", num_values=0),
    *_ignored("use --kernels instead", "--attention-backend"),
    *_ignored("paxkv has no cascade attention", "--disable-cascade-attn", num_values=0),
    *_ignored("set HF_HOME instead", "--download-dir"),
    *_ignored("set HF_TOKEN instead", "--hf-token"),
    *_ignored("only the needed files are downloaded", "--ignore-patterns", num_values="+"),
    *_ignored("loading shows no progress bar", "--use-tqdm-on-load", num_values=0),
    *_ignored(_LOGS, "--disable-log-requests", "--enable-log-requests", num_values=0),
    *_ignored(_LOGS, "--enable-log-outputs", "--enable-log-deltas", num_values=0),
    *_ignored(_LOGS, "--max-log-len", "--uvicorn-log-level", "--log-config-file"),
    *_ignored(
        "internal errors are always logged with a traceback", "--log-error-stack", num_values=0
    ),
    *_ignored("paxkv hides no metrics", "--show-hidden-metrics-for-version"),
    *_ignored("use --kv-cache-metrics-sample instead", "--kv-cache-metrics", num_values=0),
    *_ignored("no traces are exported", "--otlp-traces-endpoint"),
    *_ignored("no traces are exported", "--collect-detailed-traces", num_values="+"),
    *_ignored("every answer has an X-Request-Id", "--enable-request-id-headers", num_values=0),
    *_ignored("/load is always available", "--enable-server-load-tracking", num_values=0),
    *_ignored(
        "usage always contains prompt_tokens_details",
        "--enable-prompt-tokens-details",
        num_values=0,
    ),
    *_ignored(
        "--max-header-bytes limits the size of all headers together", "--h11-max-header-count"
    ),
    *_ignored(
        "there is no documentation page to disable; /openapi.json describes the API",
        "--disable-fastapi-docs",
        num_values=0,
    ),
    *_ignored(
        "the engine is always a process of its own",
        "--disable-frontend-multiprocessing",
        num_values=0,
    ),
    *_ignored(_NO_MULTIMODAL, "--limit-mm-per-prompt", "--mm-processor-kwargs"),
    *_ignored(_NO_MULTIMODAL, "--mm-processor-cache-gb", "--allowed-local-media-path"),
    *_ignored(_NO_MULTIMODAL, "--mm-encoder-tp-mode"),
    VllmFlag(("--tokenizer-mode",), _HUGGING_FACE, accepted=("auto", "hf")),
    VllmFlag(("--config-format",), _HUGGING_FACE, accepted=("auto", "hf")),
    VllmFlag(("--runner",), "the engine only generates text", accepted=("auto", "generate")),
    VllmFlag(("--convert",), "models are not converted", accepted=("auto", "none")),
    VllmFlag(("--task",), "the engine only generates text", accepted=("auto", "generate")),
    VllmFlag(("--logprobs-mode",), "log-probabilities are always raw", accepted=("raw_logprobs",)),
    VllmFlag(("--max-num-partial-prefills",), _PARTIAL_PREFILLS, accepted=("1",)),
    VllmFlag(("--max-long-partial-prefills",), _PARTIAL_PREFILLS, accepted=("1",)),
    VllmFlag(("--stream-interval",), "tokens are streamed as they are generated", accepted=("1",)),
    VllmFlag(("--cpu-offload-gb",), "weights stay on the device", accepted=("0",)),
    VllmFlag(("--response-role",), "answers have the role assistant", accepted=("assistant",)),
    *_refused(_MODEL, "--tokenizer", "--hf-config-path", "--hf-overrides"),
    *_refused(_MODEL, "--model-loader-extra-config"),
    *_refused(_MODEL, "--disable-sliding-window", "--skip-tokenizer-init", num_values=0),
    *_refused(
        "download the revision with huggingface_hub, and pass its folder as the model",
        "--revision",
        "--code-revision",
        "--tokenizer-revision",
    ),
    VllmFlag(("--quantization", "-q"), "quantised weights are not supported", 1, ()),
    *_refused("LoRA adapters are not supported", "--enable-lora", num_values=0),
    *_refused("LoRA adapters are not supported", "--lora-modules", num_values="+"),
    *_refused("speculative decoding is not supported", "--speculative-config"),
    *_refused("KV cache transfer is not supported", "--kv-transfer-config"),
    *_refused("KV cache offloading is not supported", "--kv-offloading-size"),
    *_refused(
        "use --num-gpu-blocks-override, or --cpu-kv-cache-bytes on the CPU",
        "--kv-cache-memory-bytes",
    ),
    *_refused("prompts are text or token ids", "--enable-prompt-embeds", num_values=0),
    *_refused("use --profile-dir with --enable-admin instead", "--profiler-config"),
    *_refused(_NO_CLASSES, "--scheduler-cls", "--worker-cls", "--middleware"),
    *_refused(_NO_CLASSES, "--logits-processors", num_values="+"),
    *_refused("paxkv listens only on a network address: use --host and --port", "--uds"),
    *_refused("restart the server to use new certificates", "--enable-ssl-refresh", num_values=0),
    *_refused("Python's default ciphers are used", "--ssl-ciphers"),
    *_refused(
        "set return_tokens_as_token_ids in requests", "--return-tokens-as-token-ids", num_values=0
    ),
    *_refused(
        "clients ask for the usage of a stream with stream_options",
        "--enable-force-include-usage",
        num_values=0,
    ),
)  # fmt: skip


def add_vllm_flags(parser: argparse.ArgumentParser) -> None:
    """Lets a parser read those flags of vLLM that it does not have itself, without showing them."""
    for flag in VLLM_FLAGS:
        names = [name for name in flag.names if name not in parser._option_string_actions]
        if flag.num_values == 0:
            names += [name.replace("--", "--no-", 1) for name in names if name.startswith("--")]
        nargs = None if flag.num_values == 1 else flag.num_values
        if names:
            parser.add_argument(
                *names,
                nargs=nargs,
                action=_NoteAction,
                dest=argparse.SUPPRESS,
                default=argparse.SUPPRESS,
                help=argparse.SUPPRESS,
                flag=flag,
            )


def take_warnings(namespace: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """What to tell of the flags that are passed over; a refused one ends the program."""
    warnings = []
    for name, flag, values in vars(namespace).pop(_SEEN, []):
        if flag.accepted is None:
            warnings.append(f"{name} has no effect: {flag.reason}.")
        elif not values or not set(values) <= set(flag.accepted):
            got = f", got {' '.join(values)!r}" if values else ""
            wanted = f"; wanted {' or '.join(flag.accepted)}" if flag.accepted else ""
            parser.error(f"vLLM's {name} is not supported here: {flag.reason}{got}{wanted}.")
    return warnings


class _NoteAction(argparse.Action):
    """Notes that a flag was there; whether that is right is decided when all have been read."""

    def __init__(self, *, flag: VllmFlag, **named: object) -> None:
        super().__init__(**named)
        self._flag = flag

    def __call__(
        self,
        _parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[str] | None,
        option_string: str | None = None,
    ) -> None:
        values = [values] if isinstance(values, str) else list(values or ())
        seen = getattr(namespace, _SEEN, [])
        setattr(namespace, _SEEN, [*seen, (option_string, self._flag, values)])
