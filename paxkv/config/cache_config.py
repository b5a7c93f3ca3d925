"""Settings of the paged KV cache, with their help texts."""

import dataclasses
from typing import Literal

from paxkv.config.kv_events_config import KVEventsConfig
from paxkv.config.setting import at_least, is_number, one_of, setting, true_or_false
from paxkv.errors import ConfigError

KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16"]
PrefixCachingHashAlgo = Literal["sha256", "sha256_cbor", "xxhash"]


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
