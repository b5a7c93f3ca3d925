"""How many KV blocks fit: from a setting, from the device's memory, or from the host's."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import NamedTuple

import jax

from models import Platform
from paxkv.config.engine_config import CacheConfig
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
)
from paxkv.errors import ConfigError, InvariantError, KVCacheTooSmallError
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups

_NULL_BLOCK = 1
# Of what JAX may take, left for fragmentation and for what compiling tries out. A guess: it was
# never measured on an accelerator.
_SLACK_SHARE = 0.02
# Of the host's free memory, which other programs need too. Compiling takes up to 0.5 GiB per core.
_HOST_SHARE = 0.5
# The most that a host's pool gets, unless one request of `max_model_len` needs more. A CPU computes
# so slowly that a larger pool would seldom be used.
_ENOUGH_HOST_BYTES = 4 * 2**30
# The least that is useful on a host: small models use it for their prefix cache.
_LEAST_HOST_BYTES = 2**28
# Slots are counted in int32, in the whole cache and once more by the largest row offset.
_MAX_SLOTS = (2**31 - 1) // 2
# Tokens: longer than any window together with a step.
_FAR = 2**40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of an accelerator, in bytes, before the KV cache is allocated."""

    total_bytes: int  # of the device
    limit_bytes: int  # what JAX may take of it
    used_bytes: int  # already in use, plus arrays to be allocated besides the KV cache
    activation_bytes: int  # temporary memory of the largest step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of a CPU's host.

    Args:
        free_bytes: For this engine, after its weights are loaded.
    """

    free_bytes: int

    @staticmethod
    def of_engines(free_bytes: int, *, num_engines: int, weight_bytes: int) -> "HostMemory":
        """The equal part of each of several engines, when only the first has loaded its weights.

        Args:
            free_bytes: Of the host, or of the container.
            weight_bytes: Of one engine.
        """
        free_bytes -= weight_bytes * (num_engines - 1)
        return HostMemory(free_bytes=max(0, free_bytes // num_engines))


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
    max_num_seqs: int,
    memory: DeviceMemory | HostMemory | None,
) -> MemoryPlan:
    """Decides the number of blocks.

    Args:
        memory: May be None if a setting has the number of blocks.

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
            reason="the number of blocks is given",
            padded_shares=groups.padded_shares,
        )
    num_longest = _num_blocks_of_longest_req(group_specs, max_model_len, max_num_batched_tokens)
    num_wanted = _NULL_BLOCK + num_longest
    if isinstance(memory, DeviceMemory):
        size = _size_on_device(memory, cache_config.gpu_memory_utilization, block_bytes)
    else:
        size = _size_on_host(
            memory,
            cache_config.cpu_kv_cache_bytes,
            block_bytes,
            num_longest=num_longest,
            max_num_seqs=max_num_seqs,
        )
    reason = size.reason
    largest_block_size = max(group.kv_cache_spec.block_size for group in group_specs)
    num_blocks = min(size.num_blocks, _MAX_SLOTS // (_num_rows(group_specs) * largest_block_size))
    if num_blocks < num_wanted:
        raise KVCacheTooSmallError(
            f"the KV cache is too small for one request of max_model_len={max_model_len}: got "
            f"{max(num_blocks, 0)} blocks ({reason}), wanted at least {num_wanted} blocks, or "
            f"{_mib(num_wanted * block_bytes)}. Set a smaller max_model_len, or {size.remedy}.",
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
    device: jax.Device,
    platform: Platform,
    *,
    weight_bytes: int,
    planned_bytes: int,
    activation_bytes: int,
) -> DeviceMemory:
    """Memory of `device` as it is now.

    Args:
        weight_bytes: Of the weights, which are on the device.
        planned_bytes: Of arrays besides the KV cache that will be allocated.
        activation_bytes: See `DeviceMemory`.

    Raises:
        ConfigError: The device does not report its memory.
    """
    stats = device.memory_stats() or {}
    if "bytes_limit" not in stats:
        raise ConfigError(
            f"{device} does not report its memory; set num_gpu_blocks_override instead."
        )
    limit_bytes = stats["bytes_limit"]
    return DeviceMemory(
        total_bytes=platform.total_memory_bytes(limit_bytes),
        limit_bytes=limit_bytes,
        used_bytes=max(weight_bytes, stats.get("bytes_in_use", 0)) + planned_bytes,
        activation_bytes=activation_bytes,
    )


def _free_bytes(memory: DeviceMemory, utilization: float) -> int:
    usable_bytes = min(memory.total_bytes * utilization, memory.limit_bytes * (1 - _SLACK_SHARE))
    return int(usable_bytes) - memory.used_bytes - memory.activation_bytes


class _Size(NamedTuple):
    """A number of blocks; why there are not more; and how there can be more."""

    num_blocks: int
    reason: str
    remedy: str


def _size_on_device(memory: DeviceMemory, utilization: float, block_bytes: int) -> _Size:
    return _Size(
        num_blocks=_rounded_down(_free_bytes(memory, utilization) // block_bytes),
        reason=(
            f"{utilization:g} of {_mib(memory.total_bytes)}, of which JAX may take "
            f"{_mib(memory.limit_bytes)}, less {_mib(memory.used_bytes)} in use and "
            f"{_mib(memory.activation_bytes)} for a step"
        ),
        remedy="a larger gpu_memory_utilization, or use a device with more memory",
    )


def _size_on_host(
    memory: HostMemory | None,
    pool_bytes: int | None,
    block_bytes: int,
    *,
    num_longest: int,
    max_num_seqs: int,
) -> _Size:
    """The size on a CPU.

    Args:
        pool_bytes: `CacheConfig.cpu_kv_cache_bytes`.
        num_longest: Blocks of one request of `max_model_len` tokens.
    """
    if pool_bytes is not None:
        reason = f"cpu_kv_cache_bytes={pool_bytes}"
        return _Size(pool_bytes // block_bytes, reason, "a larger cpu_kv_cache_bytes")
    if memory is None:
        raise InvariantError("neither a setting nor memory decides the size of the KV cache.")
    pool_bytes = _host_pool_bytes(
        memory.free_bytes,
        longest_bytes=(_NULL_BLOCK + num_longest) * block_bytes,
        most_bytes=(_NULL_BLOCK + max_num_seqs * num_longest) * block_bytes,
    )
    return _Size(
        num_blocks=pool_bytes // block_bytes,
        reason=(
            f"cpu_kv_cache_bytes is not set: at most {_HOST_SHARE:g} of the "
            f"{_mib(memory.free_bytes)} that are free after the weights"
        ),
        remedy="a larger cpu_kv_cache_bytes, or free memory by ending other programs",
    )


def _host_pool_bytes(free_bytes: int, *, longest_bytes: int, most_bytes: int) -> int:
    """The default size on a host.

    The pool has the useful size if that is at most `_HOST_SHARE` of the free memory. Otherwise, the
    share is rounded down to a power of two, because programs are compiled for a number of blocks.

    Args:
        longest_bytes: For one request of `max_model_len` tokens.
        most_bytes: For as many of those as run at once.
    """
    useful_bytes = max(longest_bytes, _LEAST_HOST_BYTES, min(_ENOUGH_HOST_BYTES, most_bytes))
    share_bytes = int(free_bytes * _HOST_SHARE)
    if useful_bytes <= share_bytes:
        return useful_bytes
    rounded_bytes = 1 << (share_bytes.bit_length() - 1) if share_bytes else 0
    return max(rounded_bytes, longest_bytes) if longest_bytes <= share_bytes else rounded_bytes


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
