"""How many KV blocks fit: from a setting, from the device's memory, or from the CPU's default."""

import dataclasses
import os

import jax

from models import LayerKVSpec
from paxkv.config import CacheConfig
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.errors import ConfigError, InvariantError

# JAX's variable for the share of a GPU's memory that it takes, and its value when it is not set.
GPU_SHARE_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
DEFAULT_GPU_SHARE = 0.75

_NULL_BLOCK = 1
# Of what JAX may take, left for fragmentation and for what compiling tries out. A guess: it was
# never measured on an accelerator.
_SLACK_SHARE = 0.02
# Slots are counted in int32, in the whole cache and once more by the largest row offset.
_MAX_SLOTS = (2**31 - 1) // 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of an accelerator, in bytes, before the KV cache is allocated."""

    total_bytes: int  # of the device
    limit_bytes: int  # what JAX may take of it
    used_bytes: int  # weights, and whatever else is there
    activation_bytes: int  # temporary memory of the largest step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV cache that was decided on, and why."""

    kv_cache_config: KVCacheConfig
    max_model_len: int
    reason: str

    @property
    def block_bytes(self) -> int:
        return _block_bytes(self.kv_cache_config.kv_cache_groups[0])

    @property
    def pool_bytes(self) -> int:
        return self.kv_cache_config.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once; the null block holds none."""
        block_size = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
        return (self.kv_cache_config.num_blocks - _NULL_BLOCK) * block_size

    @property
    def num_longest_reqs(self) -> int:
        """Requests of `max_model_len` tokens that fit at once."""
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        usable_blocks = self.kv_cache_config.num_blocks - _NULL_BLOCK
        return usable_blocks // spec.max_blocks_per_req(self.max_model_len)

    def report(self) -> str:
        """The plan in one line, for the log."""
        spec = self.kv_cache_config.kv_cache_groups[0].kv_cache_spec
        return (
            f"KV cache: {self.kv_cache_config.num_blocks} blocks of {spec.block_size} tokens "
            f"({spec.dtype}, {self.block_bytes // spec.block_size} bytes a token, "
            f"{_mib(self.pool_bytes)} in all; {self.reason}): {self.num_tokens} tokens, or "
            f"{self.num_longest_reqs} requests of {self.max_model_len}"
        )


def kv_cache_group(
    layers: tuple[LayerKVSpec, ...], *, block_size: int, dtype: str
) -> KVCacheGroupSpec:
    """The one group of a model whose layers all cache alike.

    Raises:
        InvariantError: They differ.
    """
    formats = {(layer.num_kv_heads, layer.head_dim) for layer in layers}
    if len(formats) != 1:
        raise InvariantError(f"layers of one group must cache alike, got {sorted(formats)}.")
    ((num_kv_heads, head_dim),) = formats
    return KVCacheGroupSpec(
        layer_names=tuple(layer.name for layer in layers),
        kv_cache_spec=FullAttentionSpec(
            block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_dim, dtype=dtype
        ),
    )


def plan_memory(
    group: KVCacheGroupSpec,
    cache_config: CacheConfig,
    *,
    max_model_len: int,
    device_memory: DeviceMemory | None,
) -> MemoryPlan:
    """Decides the number of blocks.

    Args:
        device_memory: None on the CPU, where `cpu_kv_cache_bytes` decides.

    Raises:
        ConfigError: Not even one request of `max_model_len` tokens fits what was measured.
    """
    block_bytes = _block_bytes(group)
    if cache_config.num_gpu_blocks_override is not None:
        # Taken at its word, also when one request of max_model_len does not fit: then requests
        # that are too long for the pool are refused one by one.
        return MemoryPlan(
            kv_cache_config=KVCacheConfig(
                num_blocks=cache_config.num_gpu_blocks_override, kv_cache_groups=(group,)
            ),
            max_model_len=max_model_len,
            reason="num_gpu_blocks_override",
        )
    if device_memory is None:
        num_blocks = cache_config.cpu_kv_cache_bytes // block_bytes
        reason = f"cpu_kv_cache_bytes={cache_config.cpu_kv_cache_bytes}"
        remedy = "a larger cpu_kv_cache_bytes"
    else:
        num_blocks = _free_bytes(device_memory, cache_config.gpu_memory_utilization) // block_bytes
        reason = (
            f"{cache_config.gpu_memory_utilization:g} of {_mib(device_memory.total_bytes)}, "
            f"of which JAX may take {_mib(device_memory.limit_bytes)}, less "
            f"{_mib(device_memory.used_bytes)} in use and "
            f"{_mib(device_memory.activation_bytes)} for a step"
        )
        remedy = "a larger gpu_memory_utilization, or a device with more memory"
    num_blocks = min(num_blocks, _MAX_SLOTS // (len(group.layer_names) * cache_config.block_size))
    num_wanted = group.kv_cache_spec.max_blocks_per_req(max_model_len) + _NULL_BLOCK
    if num_blocks < num_wanted:
        raise ConfigError(
            f"the KV cache is too small for one request of max_model_len={max_model_len}: got "
            f"{max(num_blocks, 0)} blocks ({reason}), wanted at least {num_wanted} blocks, or "
            f"{_mib(num_wanted * block_bytes)}. Set a smaller max_model_len, or {remedy}."
        )
    return MemoryPlan(
        kv_cache_config=KVCacheConfig(num_blocks=num_blocks, kv_cache_groups=(group,)),
        max_model_len=max_model_len,
        reason=reason,
    )


def measure_device_memory(
    device: jax.Device, params: tuple[jax.Array, ...], activation_bytes: int
) -> DeviceMemory:
    """Memory of `device` as it is now.

    Raises:
        ConfigError: The device does not tell.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            f"{device} does not report its memory; set num_gpu_blocks_override instead."
        )
    params_bytes = sum(param.nbytes for param in params)
    limit_bytes = stats["bytes_limit"]
    # On GPUs the limit is a share of the memory that JAX is told before it starts.
    share = float(os.environ.get(GPU_SHARE_VARIABLE, DEFAULT_GPU_SHARE))
    return DeviceMemory(
        total_bytes=int(limit_bytes / share) if device.platform == "gpu" else limit_bytes,
        limit_bytes=limit_bytes,
        used_bytes=max(params_bytes, stats.get("bytes_in_use", 0)),
        activation_bytes=activation_bytes,
    )


def _free_bytes(memory: DeviceMemory, utilization: float) -> int:
    usable_bytes = min(memory.total_bytes * utilization, memory.limit_bytes * (1 - _SLACK_SHARE))
    return int(usable_bytes) - memory.used_bytes - memory.activation_bytes


def _block_bytes(group: KVCacheGroupSpec) -> int:
    """Bytes of one block of the pool: a page for each layer."""
    return len(group.layer_names) * group.kv_cache_spec.page_size_bytes


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"
