"""How many KV blocks fit: from a setting, from the device's memory, or from the CPU's default."""

import collections
import dataclasses
import math
from collections.abc import Mapping

import jax

from models import Platform
from paxkv.config.engine_config import CacheConfig
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from paxkv.errors import ConfigError, KVCacheTooSmallError
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups

_NULL_BLOCK = 1
# Of what JAX may take, left for fragmentation and for what compiling tries out. A guess: it was
# never measured on an accelerator.
_SLACK_SHARE = 0.02
# Slots are counted in int32, in the whole cache and once more by the largest row offset.
_MAX_SLOTS = (2**31 - 1) // 2
# Tokens: longer than any window together with a step.
_FAR = 2**40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of an accelerator, in bytes, before the KV cache is allocated."""

    total_bytes: int  # of the device
    limit_bytes: int  # what JAX may take of it
    used_bytes: int  # weights, and whatever else is there
    activation_bytes: int  # temporary memory of the largest step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV cache that was decided on, and why.

    Args:
        max_num_batched_tokens: Most tokens that one step computes of a request: sliding windows
            hold them besides the window.
        padded_shares: See `KVCacheGroups`.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int
    reason: str
    padded_shares: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def block_bytes(self) -> int:
        return _block_bytes(self._groups)

    @property
    def pool_bytes(self) -> int:
        return self.kv_cache_config.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens that fit at once where every group holds all of them: sequences so short that
        none has left a window. The null block holds none.
        """
        unit = math.lcm(*(spec.block_size for spec in self._specs))
        blocks_per_unit = sum(unit // spec.block_size for spec in self._specs)
        return self._num_usable_blocks * unit // blocks_per_unit

    @property
    def num_longest_reqs(self) -> int:
        """Requests of `max_model_len` tokens that fit at once."""
        return self._num_usable_blocks // _num_blocks_of_longest_req(
            self._groups, self.max_model_len, self.max_num_batched_tokens
        )

    @property
    def max_fitting_len(self) -> int:
        """The most tokens, up to `max_model_len`, that one request may have to fit."""
        return _max_fitting_len(
            self._groups, self._num_usable_blocks, self.max_model_len, self.max_num_batched_tokens
        )

    @property
    def token_bytes(self) -> float:
        """Bytes that a token takes in all groups."""
        return sum(self.block_bytes / spec.block_size for spec in self._specs)

    @property
    def late_token_bytes(self) -> float:
        """Bytes that one more token of a long sequence takes: only where no other is given up."""
        return sum(
            self.block_bytes / spec.block_size
            for spec in self._specs
            if _grows_forever(spec, self.max_num_batched_tokens)
        )

    def report(self) -> str:
        """The plan in one line, for the log."""
        block_sizes = sorted({spec.block_size for spec in self._specs})
        num_groups = len(self._groups)
        in_groups = f" in {num_groups} groups" if num_groups > 1 else ""
        dtypes = ", ".join(dict.fromkeys(_dtype_of(spec) for spec in self._specs))
        late = ""
        if self.late_token_bytes != self.token_bytes:
            late = f", {self.late_token_bytes:.0f} past the window of a long sequence"
        return (
            f"KV cache: {self.kv_cache_config.num_blocks} blocks of "
            f"{' or '.join(map(str, block_sizes))} tokens{in_groups} ({dtypes}, "
            f"{self.token_bytes:.0f} bytes a token{late}, {_mib(self.pool_bytes)} in all; "
            f"{self.reason}): {self.num_tokens} tokens, or {self.num_longest_reqs} requests of "
            f"{self.max_model_len}{self._padding()}"
        )

    def _padding(self) -> str:
        """What of the pool is padding, for caches that share it with those of larger pages."""
        counts = collections.Counter(self.padded_shares.values())
        if not counts:
            return ""
        parts = [
            f"{share:.1%} of the pages of {num} cache{'' if num == 1 else 's'}"
            for share, num in counts.items()
        ]
        return f"; padding: {', '.join(parts)}"

    @property
    def _groups(self) -> tuple[KVCacheGroupSpec, ...]:
        return self.kv_cache_config.kv_cache_groups

    @property
    def _specs(self) -> list[KVCacheSpec]:
        return [group.kv_cache_spec for group in self._groups]

    @property
    def _num_usable_blocks(self) -> int:
        return self.kv_cache_config.num_blocks - _NULL_BLOCK


def plan_memory(
    groups: KVCacheGroups,
    cache_config: CacheConfig,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    device_memory: DeviceMemory | None,
) -> MemoryPlan:
    """Decides the number of blocks.

    Args:
        device_memory: None on the CPU, where `cpu_kv_cache_bytes` decides.

    Raises:
        KVCacheTooSmallError: Not even one request of `max_model_len` tokens fits what was measured.
    """
    group_specs = groups.kv_cache_groups
    block_bytes = _block_bytes(group_specs)
    if cache_config.num_gpu_blocks_override is not None:
        # Taken at its word, also when one request of max_model_len does not fit: then requests
        # that are too long for the pool are refused one by one.
        return MemoryPlan(
            kv_cache_config=groups.config(cache_config.num_gpu_blocks_override),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            reason="num_gpu_blocks_override",
            padded_shares=groups.padded_shares,
        )
    if device_memory is None:
        num_blocks = cache_config.cpu_kv_cache_bytes // block_bytes
        reason = f"cpu_kv_cache_bytes={cache_config.cpu_kv_cache_bytes}"
        remedy = "a larger cpu_kv_cache_bytes"
    else:
        num_blocks = _rounded_down(
            _free_bytes(device_memory, cache_config.gpu_memory_utilization) // block_bytes
        )
        reason = (
            f"{cache_config.gpu_memory_utilization:g} of {_mib(device_memory.total_bytes)}, "
            f"of which JAX may take {_mib(device_memory.limit_bytes)}, less "
            f"{_mib(device_memory.used_bytes)} in use and "
            f"{_mib(device_memory.activation_bytes)} for a step"
        )
        remedy = "a larger gpu_memory_utilization, or a device with more memory"
    largest_block_size = max(group.kv_cache_spec.block_size for group in group_specs)
    num_blocks = min(num_blocks, _MAX_SLOTS // (_num_rows(group_specs) * largest_block_size))
    num_wanted = _NULL_BLOCK + _num_blocks_of_longest_req(
        group_specs, max_model_len, max_num_batched_tokens
    )
    if num_blocks < num_wanted:
        raise KVCacheTooSmallError(
            f"the KV cache is too small for one request of max_model_len={max_model_len}: got "
            f"{max(num_blocks, 0)} blocks ({reason}), wanted at least {num_wanted} blocks, or "
            f"{_mib(num_wanted * block_bytes)}. Set a smaller max_model_len, or {remedy}.",
            max_fitting_len=_max_fitting_len(
                group_specs, num_blocks - _NULL_BLOCK, max_model_len, max_num_batched_tokens
            ),
        )
    return MemoryPlan(
        kv_cache_config=groups.config(num_blocks),
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        reason=reason,
        padded_shares=groups.padded_shares,
    )


def measure_device_memory(
    device: jax.Device, platform: Platform, held: tuple[jax.Array, ...], activation_bytes: int
) -> DeviceMemory:
    """Memory of `device` as it is now.

    Args:
        held: Arrays that stay: weights, and what steps hand on to each other.

    Raises:
        ConfigError: The device does not tell.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            f"{device} does not report its memory; set num_gpu_blocks_override instead."
        )
    held_bytes = sum(array.nbytes for array in held)
    limit_bytes = stats["bytes_limit"]
    return DeviceMemory(
        total_bytes=platform.total_memory_bytes(limit_bytes),
        limit_bytes=limit_bytes,
        used_bytes=max(held_bytes, stats.get("bytes_in_use", 0)),
        activation_bytes=activation_bytes,
    )


def _free_bytes(memory: DeviceMemory, utilization: float) -> int:
    usable_bytes = min(memory.total_bytes * utilization, memory.limit_bytes * (1 - _SLACK_SHARE))
    return int(usable_bytes) - memory.used_bytes - memory.activation_bytes


def _num_rows(groups: tuple[KVCacheGroupSpec, ...]) -> int:
    return max(len(group.layer_names) for group in groups)


def _block_bytes(groups: tuple[KVCacheGroupSpec, ...]) -> int:
    """Bytes of one block of the pool: a page for each row. All groups' pages are of one size."""
    return _num_rows(groups) * groups[0].kv_cache_spec.page_size_bytes


def _rounded_down(num_blocks: int) -> int:
    """To 7 binary digits: programs are compiled for a number of blocks, and free memory differs by
    a little from start to start.
    """
    step = 1 << max(0, num_blocks.bit_length() - 7)
    return num_blocks // step * step


def _num_blocks_of_longest_req(
    groups: tuple[KVCacheGroupSpec, ...], max_model_len: int, max_num_batched_tokens: int
) -> int:
    """Most blocks that a request of `max_model_len` tokens holds at once, in all groups."""
    return sum(
        group.kv_cache_spec.max_held_blocks(
            max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens
        )
        for group in groups
    )


def _max_fitting_len(
    groups: tuple[KVCacheGroupSpec, ...],
    num_usable_blocks: int,
    max_model_len: int,
    max_num_batched_tokens: int,
) -> int:
    """The most tokens, up to `max_model_len`, of a request that the blocks hold."""
    fits, exceeds = 0, max_model_len + 1
    while exceeds - fits > 1:
        middle = (fits + exceeds) // 2
        num_blocks = _num_blocks_of_longest_req(groups, middle, max_num_batched_tokens)
        fits, exceeds = (middle, exceeds) if num_blocks <= num_usable_blocks else (fits, middle)
    return fits


def _grows_forever(spec: KVCacheSpec, max_num_batched_tokens: int) -> bool:
    """Whether a request holds more blocks the longer it gets, however long it is."""

    def num_held(num_tokens: int) -> int:
        return spec.max_held_blocks(
            max_model_len=num_tokens, max_num_batched_tokens=max_num_batched_tokens
        )

    return num_held(2 * _FAR) > num_held(_FAR)


def _dtype_of(spec: KVCacheSpec) -> str:
    return spec.dtype if isinstance(spec, AttentionSpec) else "state"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def report_memory(resident_bytes: int, weight_bytes: int, pool_bytes: int) -> str:
    """The memory of a CPU's process in one line, for the log.

    Args:
        resident_bytes: What the process occupies after the start. The KV cache occupies nothing
            until requests fill it.
    """
    other_bytes = max(0, resident_bytes - weight_bytes)
    return (
        f"memory: {_mib(resident_bytes)} in use after the start, {_mib(weight_bytes)} of it "
        f"weights and {_mib(other_bytes)} programs, libraries and buffers; the KV cache takes up "
        f"to {_mib(pool_bytes)} more as requests fill it"
    )
