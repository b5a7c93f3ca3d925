"""Which features an engine uses with its model and settings, and why it does not use the others."""

import math
from collections.abc import Sequence

from paxkv.config.engine_config import FIT_MEMORY, EngineConfig
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
    """The use of each feature that some models, devices or settings leave without effect.

    Args:
        max_model_len: The limit that the engine has.
        num_positions: The limit that the checkpoint has.
        why_no_kernels: Why all operations on the KV cache run as plain XLA; None if they do not.
        ops_without_kernels: Operations that run as plain XLA nevertheless, with their reasons.
    """
    return (
        _prefix_cache(config, kv_cache_config, max_model_len),
        _bursts(config, kv_cache_config),
        _batch_invariance(config),
        _kernels(why_no_kernels, ops_without_kernels),
        _full_context(config, max_model_len, num_positions),
    )


def _prefix_cache(
    config: EngineConfig, kv_cache_config: KVCacheConfig, max_model_len: int
) -> FeatureUse:
    name = "prefix_cache"
    if not config.cache.enable_prefix_caching:
        return FeatureUse(name=name, is_used=False, detail="--no-enable-prefix-caching is set.")
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    if any(isinstance(spec, CrossAttentionSpec) for spec in specs):
        return FeatureUse(
            name=name,
            is_used=False,
            detail="the model has cross-attention, and block hashes do not name encoder inputs.",
        )
    # A hit consists of whole blocks in every group, before the last token of the prompt. A prompt
    # leaves room for one output token.
    num_tokens = math.lcm(*(spec.block_size for spec in specs))
    if num_tokens > max_model_len - 2:
        return FeatureUse(
            name=name,
            is_used=False,
            detail=f"prefixes are shared in multiples of {num_tokens} tokens, and no prompt is "
            f"longer than that with max_model_len={max_model_len}. Set a smaller --block-size.",
        )
    return FeatureUse(
        name=name, is_used=True, detail=f"prefixes are shared in multiples of {num_tokens} tokens."
    )


def _bursts(config: EngineConfig, kv_cache_config: KVCacheConfig) -> FeatureUse:
    name = "bursts"
    reason = None
    if config.runner.batch_invariant:
        reason = "--batch-invariant computes one decode step at a time."
    elif config.scheduler.max_decode_burst == 1:
        reason = "--max-decode-burst is 1."
    elif kv_cache_config.has_mamba_layers:
        reason = "the model has layers with states, which bursts cannot rewind."
    if reason is not None:
        return FeatureUse(name=name, is_used=False, detail=reason)
    return FeatureUse(
        name=name,
        is_used=True,
        detail=f"up to {config.scheduler.max_decode_burst} decode steps, as many as the device "
        f"computes in {MAX_BURST_S:g} s, or in {MAX_STREAMED_BURST_S:g} s while a client streams.",
    )


def _batch_invariance(config: EngineConfig) -> FeatureUse:
    is_used = config.runner.batch_invariant
    return FeatureUse(
        name="batch_invariance",
        is_used=is_used,
        detail="steps are computed in tiles of fixed shape."
        if is_used
        else "--batch-invariant is not set, so the last bits of logits depend on the batch.",
    )


def _kernels(why_no_kernels: str | None, ops_without_kernels: Sequence[str]) -> FeatureUse:
    if why_no_kernels is not None:
        return FeatureUse(name="kernels", is_used=False, detail=f"plain XLA runs: {why_no_kernels}")
    detail = "kernels for this device run."
    if ops_without_kernels:
        detail = f"kernels for this device run, except: {' '.join(ops_without_kernels)}"
    return FeatureUse(name="kernels", is_used=True, detail=detail)


def _full_context(config: EngineConfig, max_model_len: int, num_positions: int) -> FeatureUse:
    asked = config.model.max_model_len
    detail = f"max_model_len is {max_model_len} of the checkpoint's {num_positions} positions"
    if max_model_len >= num_positions:
        reason = ""
    elif asked not in (None, FIT_MEMORY):
        reason = ", as --max-model-len sets it"
    elif config.runner.compiled_dir is not None:
        reason = ", which the programs in --compiled-dir were compiled for"
    else:
        reason = ", because the KV cache has no room for a longer request"
    return FeatureUse(
        name="full_context", is_used=max_model_len >= num_positions, detail=f"{detail}{reason}."
    )
