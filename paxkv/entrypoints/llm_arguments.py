"""Arguments of vLLM's `LLM` that paxkv's `LLM` does not have: accepts, ignores or rejects them."""

import dataclasses
import json
import re
import warnings
from collections.abc import Mapping

from paxkv.config.vllm_flags import VLLM_FLAGS, VllmFlag
from paxkv.errors import ConfigError

# Arguments that exist as flags of `paxkv serve`, but have no meaning for `LLM`.
_SERVER_FLAGS = (
    VllmFlag(
        ("--disable-log-stats",),
        "LLM writes no statistics; call get_stats",
        neutral=(True,),
    ),
    VllmFlag(("--stream-interval",), "LLM returns whole answers", neutral=(1,)),
    VllmFlag(
        ("--reasoning-parser",),
        "LLM returns thoughts and answer as one text",
        is_refused=True,
        neutral=("",),
    ),
    VllmFlag(
        ("--structured-outputs-config",),
        "set the options in StructuredOutputsParams",
        is_refused=True,
        neutral=({},),
    ),
)
_LLM_FLAGS: Mapping[str, VllmFlag] = {
    name.removeprefix("--").replace("-", "_"): flag
    for flag in (*VLLM_FLAGS, *_SERVER_FLAGS)
    for name in flag.names
    if name.startswith("--")
}
_FLAG_IN_TEXT = re.compile(r"--([a-z][a-z-]*)")


def llm_flag(name: str) -> VllmFlag | None:
    """vLLM's flag for an argument that `LLM` does not have; None for all other names."""
    return _LLM_FLAGS.get(name)


def drop_vllm_arguments(arguments: Mapping[str, object]) -> dict[str, object]:
    """Removes vLLM's arguments that `LLM` does not have; one warning names the ignored ones.

    Raises:
        ConfigError: An argument requests something that paxkv does not have.
    """
    ignored, rest = [], {}
    for name, value in arguments.items():
        flag = llm_flag(name)
        if flag is None:
            rest[name] = value
            continue
        verdict = flag.verdict(value)
        if verdict == "refused":
            raise ConfigError(_refusal(name, value, flag))
        if verdict == "ignored":
            ignored.append(f"{name} ({_reason(flag)})")
    if ignored:
        warnings.warn(
            f"LLM() ignores {', '.join(ignored)}. Leave them out.",
            # The warning shows the line that called LLM().
            stacklevel=3,
        )
    return rest


def json_text(value: object) -> object:
    """Converts an object to JSON text, like the value of a flag; returns other values unchanged."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    return json.dumps(value) if isinstance(value, Mapping) else value


def _refusal(name: str, value: object, flag: VllmFlag) -> str:
    accepted = [repr(neutral) for neutral in flag.neutral]
    wanted = f" Pass {' or '.join(accepted)}, or leave it out." if accepted else " Leave it out."
    return f"LLM() does not support {name}={value!r:.100}: {_reason(flag)}.{wanted}"


def _reason(flag: VllmFlag) -> str:
    """The reason, with names of arguments instead of flags: use --kernels -> use kernels."""
    return _FLAG_IN_TEXT.sub(lambda match: match[1].replace("-", "_"), flag.reason)
