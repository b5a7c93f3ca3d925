"""Lists the features that an engine uses, and the reasons why it does not use the others."""

import math
from collections.abc import Sequence

from paxkv.config.engine_config import EngineConfig
from paxkv.config.model_config import FIT_MEMORY
from paxkv.contracts.engine_start import FeatureUse
from paxkv.contracts.kv_cache_spec import CrossAttentionSpec, KVCacheConfig
from paxkv.engine.burst_length import MAX_BURST_S, MAX_STREAMED_BURST_S


def find_feature_uses(
    config: EngineConfig,
    kv_cache_config: KVCacheConfig,
    *,
    max_model_len: int,
    num_positions: int,
    why_no_kernels: str | None,
    ops_without_kernels: Sequence[str],
) -> tuple[FeatureUse, ...]:
    """Returns for each feature whether it has an effect with this model, device and settings.

    Args:
        max_model_len: The limit of the engine.
        num_positions: The limit of the checkpoint.
        why_no_kernels: The reason if all operations on the KV cache run as plain XLA; else None.
        ops_without_kernels: If kernels run: a sentence for each operation that runs as plain XLA.
    """
    uses = {
        "prefix_cache": _prefix_cache(config, kv_cache_config, max_model_len),
        "bursts": _bursts(config, kv_cache_config),
        "batch_invariance": _batch_invariance(config),
        "kernels": _kernels(why_no_kernels, ops_without_kernels),
        "full_context": _full_context(config, max_model_len, num_positions),
    }
    return tuple(
        FeatureUse(name=name, is_used=is_used, detail=detail)
        for name, (is_used, detail) in uses.items()
    )


# The functions below return whether the feature is used, and a sentence about it.


def _prefix_cache(
    config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int
) -> tuple[bool, str]:
    if not config.cache.enable_prefix_caching:
        return False, "--no-enable-prefix-caching is set."
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        return False, "the model has cross-attention, and block hashes do not name encoder inputs."
    # A hit consists of whole blocks in every group, before the last token of the prompt. A prompt
    # leaves room for one output token.
    num_tokens = math.lcm(*(spec.block_size for spec in specs))
    shared = f"prefixes are shared in multiples of {num_tokens} tokens"
    if num_tokens > max_model_len - 2:
        return False, (
            f"{shared}, and no prompt is longer than that with max_model_len={max_model_len}. Set "
            "a smaller --block-size."
        )
    return True, f"{shared}."


def _bursts(config: EngineConfig, kv_cache_config: KVCacheConfig) -> tuple[bool, str]:
    if config.runner.batch_invariant:
        return False, "--batch-invariant computes one decode step at a time."
    speculative = config.runner.speculative_config
    if speculative is not None and speculative.prevents_bursts:
        return False, f"the drafter {speculative.method!r} runs after every step."
    if config.scheduler.max_decode_burst == 1:
        return False, "--max-decode-burst is 1."
    return True, (
        f"up to {config.scheduler.max_decode_burst} decode steps, as many as the device computes "
        f"in {MAX_BURST_S:g} s, or in {MAX_STREAMED_BURST_S:g} s while a client streams."
    )


def _batch_invariance(config: EngineConfig) -> tuple[bool, str]:
    if config.runner.batch_invariant:
        return True, "steps are computed in tiles of fixed shape."
    return False, "--batch-invariant is not set, so the last bits of logits depend on the batch."


def _kernels(why_no_kernels: str | None, ops_without_kernels: Sequence[str]) -> tuple[bool, str]:
    if why_no_kernels is not None:
        return False, f"plain XLA runs: {why_no_kernels}"
    if ops_without_kernels:
        return True, f"kernels for this device run, except: {' '.join(ops_without_kernels)}"
    return True, "kernels for this device run."


def _full_context(config: EngineConfig, max_model_len: int, num_positions: int) -> tuple[bool, str]:
    detail = f"max_model_len is {max_model_len} of the checkpoint's {num_positions} positions"
    if max_model_len >= num_positions:
        return True, f"{detail}."
    if config.model.max_model_len not in (None, FIT_MEMORY):
        reason = "as --max-model-len sets it"
    elif config.runner.compiled_dir is not None:
        reason = "which the programs in --compiled-dir were compiled for"
    else:
        reason = "because the KV cache has no room for a longer request"
    return False, f"{detail}, {reason}."
