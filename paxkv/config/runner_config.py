"""Settings for the computation of steps on the device, with their help texts."""

import dataclasses
from typing import Literal

from paxkv.config.sampling_params import MAX_LOGPROBS
from paxkv.config.setting import at_least, is_number, one_of, setting, true_or_false
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError

Kernels = Literal["auto", "xla"]
# Counts of a window are 32-bit integers on the device, enough for 596,000 tokens per second.
MAX_EXPERT_LOAD_WINDOW_S = 3600


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
        "proposes tokens from finished answers too. The method mtp runs the layer for multi-token "
        "prediction of DeepSeek V3, GLM-4.5, Qwen3-Next and Qwen3.5. The methods eagle3 and "
        "draft_model run the EAGLE-3 head or the smaller model in the field model. No drafts if "
        "left out",
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
