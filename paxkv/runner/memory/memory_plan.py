"""Decides the number of KV blocks: by a setting, by the device's memory or by the host's."""

import bisect
import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import jax

from models import Platform
from paxkv.config.cache_config import CacheConfig
from paxkv.contracts.kv_cache_spec import (
    AttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from paxkv.errors import ConfigError, InvariantError, KVCacheTooSmallError
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups

_NULL_BLOCK = 1
# Share of JAX's memory that stays free, for fragmentation and for trials of the compiler. A guess:
# it was never measured on an accelerator.
_SLACK_SHARE = 0.02
# Share of the host's free memory that the KV cache may use. Other programs need memory too, and
# compiling takes up to 0.5 GiB per core.
_HOST_SHARE = 0.5
# Largest pool on a host, unless one request of `max_model_len` needs more. A CPU computes so slowly
# that a larger pool would seldom be used.
_ENOUGH_HOST_BYTES = 4 * 2**30
# Smallest useful pool on a host: small models use it for their prefix cache.
_LEAST_HOST_BYTES = 2**28
# Half of int32's range, because kernels add a row's offset to a slot (`pallas_kernels.pad_slot`).
_MAX_SLOTS = (2**31 - 1) // 2
# A number of tokens that is larger than any window together with a step.
_FAR = 2**40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of an accelerator, in bytes, before the KV cache is allocated."""

    total_bytes: int  # of the device
    limit_bytes: int  # the part that JAX may use
    used_bytes: int  # already in use, plus arrays to be allocated besides the KV cache
    activation_bytes: int  # temporary memory of the largest step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostMemory:
    """Memory of the host of a CPU.

    Args:
        free_bytes: Free memory for this engine, after it has loaded its weights.
    """

    free_bytes: int

    @staticmethod
    def of_engines(free_bytes: int, *, num_engines: int, weight_bytes: int) -> "HostMemory":
        """Divides memory equally between engines, of which only the first has loaded its weights.

        Args:
            free_bytes: Free memory of the host or container.
            weight_bytes: Bytes of the weights of one engine.
        """
        free_bytes -= weight_bytes * (num_engines - 1)
        return HostMemory(free_bytes=max(0, free_bytes // num_engines))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The size of the KV cache, and the reason for it.

    Args:
        max_num_batched_tokens: Most tokens of a request that one step computes. A sliding-window
            group holds them in addition to the window.
        num_devices: Devices that keep a part of every block. All bytes are for one device.
        padded_shares: See `KVCacheGroups`.
        num_whole_states: As `KVCacheGroups`; 0 on one device.
    """

    kv_cache_config: KVCacheConfig
    max_model_len: int
    max_num_batched_tokens: int
    num_devices: int
    reason: str
    padded_shares: Mapping[str, float]
    num_whole_states: int = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the pool: one page per row. All pages have one size."""
        return self.kv_cache_config.num_rows * self._specs[0].page_size_bytes

    @property
    def pool_bytes(self) -> int:
        return self.kv_cache_config.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Number of tokens that fit at once, if no sequence is longer than a sliding window.

        If the model has states, one sequence holds all tokens, with one slot. If it has only
        states, every sequence has `max_model_len` tokens.
        """
        if not self._token_specs:
            return self.num_longest_reqs * self.max_model_len
        unit = math.lcm(*(spec.block_size for spec in self._token_specs))
        blocks_per_unit = sum(unit // spec.block_size for spec in self._token_specs)
        num_blocks = max(0, self._num_usable_blocks - self._num_slot_blocks)
        return num_blocks * unit // blocks_per_unit

    def num_blocks_of_req(self, num_tokens: int) -> int:
        """Most blocks that a request of `num_tokens` tokens holds at once, in all groups."""
        return sum(self._num_held(spec, num_tokens) for spec in self._specs)

    @property
    def num_longest_reqs(self) -> int:
        """Requests of `max_model_len` tokens that fit at once."""
        return self._num_usable_blocks // self.num_blocks_of_req(self.max_model_len)

    @property
    def max_fitting_len(self) -> int:
        """Tokens of the longest request that fits, at most `max_model_len`; 0 if none fits."""
        return self._longest_fitting(self.max_model_len)

    @property
    def largest_max_model_len(self) -> int | None:
        """The largest `max_model_len` that has room for one request; None if every length has."""
        length = self._longest_fitting(_FAR)
        return None if length == _FAR else length

    def _longest_fitting(self, most: int) -> int:
        lengths = range(1, most + 1)
        return bisect.bisect_right(lengths, self._num_usable_blocks, key=self.num_blocks_of_req)

    @property
    def token_bytes(self) -> float:
        """Bytes of a token in all groups."""
        return sum(self.block_bytes / spec.block_size for spec in self._token_specs)

    @property
    def slot_bytes(self) -> int:
        """Bytes of the states of a running request, whatever its length."""
        return self._num_slot_blocks * self.block_bytes

    @property
    def late_token_bytes(self) -> float:
        """Bytes that one more token of a long sequence takes.

        Groups that hold a limited number of blocks, such as sliding windows, do not count.
        """
        return sum(
            self.block_bytes / spec.block_size
            for spec in self._token_specs
            if self._num_held(spec, 2 * _FAR) > self._num_held(spec, _FAR)
        )

    def report(self) -> str:
        """Describes the plan in one line, for the log."""
        sizes = sorted({spec.block_size for spec in self._token_specs})
        of_tokens = f" of {' or '.join(map(str, sizes))} tokens" if sizes else ""
        num_groups = len(self._specs)
        in_groups = f" in {num_groups} groups" if num_groups > 1 else ""
        on_devices = f" on each of {self.num_devices} devices" if self.num_devices > 1 else ""
        contents = dict.fromkeys(_content_of(spec) for spec in self._specs)
        needs = [f"{self.token_bytes:.0f} bytes per token"] if sizes else []
        if self.late_token_bytes != self.token_bytes:
            needs.append(f"{self.late_token_bytes:.0f} past the window of a long sequence")
        if self.slot_bytes:
            needs.append(f"{_mib(self.slot_bytes)} of states per running request")
        if self.num_whole_states:
            needs.append(f"{self.num_whole_states} of {self._num_states} states not split")
        return (
            f"KV cache: {self.kv_cache_config.num_blocks} blocks{of_tokens}{in_groups} "
            f"({', '.join([*contents, *needs])}, {_mib(self.pool_bytes)} in all{on_devices}; "
            f"{self.reason}): "
            f"{self.num_tokens} tokens, or {self.num_longest_reqs} requests of "
            f"{self.max_model_len}{self._largest_len()}{self._padding()}"
        )

    def _largest_len(self) -> str:
        length = self.largest_max_model_len
        return "" if length is None else f"; room for a max_model_len of up to {length}"

    def _padding(self) -> str:
        """Describes the padding in pages that are larger than the content of their caches."""
        counts = collections.Counter(self.padded_shares.values())
        if not counts:
            return ""
        parts = [
            f"{share:.1%} of the pages of {num} cache{'' if num == 1 else 's'}"
            for share, num in counts.items()
        ]
        return f"; padding: {', '.join(parts)}"

    @property
    def _specs(self) -> list[KVCacheSpec]:
        return [group.kv_cache_spec for group in self.kv_cache_config.kv_cache_groups]

    @property
    def _token_specs(self) -> list[KVCacheSpec]:
        return [spec for spec in self._specs if not isinstance(spec, MambaSpec)]

    @property
    def _num_slot_blocks(self) -> int:
        return sum(spec.num_slot_blocks for spec in self._specs if isinstance(spec, MambaSpec))

    @property
    def _num_states(self) -> int:
        groups = self.kv_cache_config.kv_cache_groups
        return sum(
            len(group.layer_names) for group in groups if isinstance(group.kv_cache_spec, MambaSpec)
        )

    @property
    def _num_usable_blocks(self) -> int:
        return self.kv_cache_config.num_blocks - _NULL_BLOCK

    def _num_held(self, spec: KVCacheSpec, num_tokens: int) -> int:
        return spec.max_held_blocks(
            max_model_len=num_tokens, max_num_batched_tokens=self.max_num_batched_tokens
        )


def _content_of(spec: KVCacheSpec) -> str:
    """Describes what a group caches, for the log."""
    if not isinstance(spec, AttentionSpec):
        return "state"
    return f"{spec.dtype} latents" if isinstance(spec, MLAAttentionSpec) else spec.dtype


def plan_memory(
    groups: KVCacheGroups,
    cache_config: CacheConfig,
    *,
    max_model_len: int,
    max_num_batched_tokens: int,
    max_num_seqs: int,
    memory: DeviceMemory | HostMemory | None,
    num_devices: int = 1,
) -> MemoryPlan:
    """Decides the number of blocks.

    Args:
        groups: With the pages of one device.
        memory: May be None if a setting decides the size of the KV cache.

    Raises:
        KVCacheTooSmallError: The memory has no room for one request of `max_model_len` tokens.
    """

    def plan_of(num_blocks: int, reason: str) -> MemoryPlan:
        return MemoryPlan(
            kv_cache_config=groups.config(num_blocks),
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            num_devices=num_devices,
            reason=reason,
            padded_shares=groups.padded_shares,
            num_whole_states=groups.num_whole_states if num_devices > 1 else 0,
        )

    if cache_config.num_gpu_blocks_override is not None:
        # Accepted even if no request of `max_model_len` fits. Each request that is too long for the
        # pool is then refused when it arrives.
        return plan_of(cache_config.num_gpu_blocks_override, "the number of blocks is given")
    empty = plan_of(0, "")
    block_bytes, num_longest = empty.block_bytes, empty.num_blocks_of_req(max_model_len)
    if isinstance(memory, DeviceMemory):
        size = _size_on_device(memory, cache_config.gpu_memory_utilization, block_bytes)
    else:
        block_bytes *= num_devices  # simulated devices share the host's memory
        size = _size_on_host(
            memory,
            cache_config.cpu_kv_cache_bytes,
            block_bytes,
            num_longest=num_longest,
            max_num_seqs=max_num_seqs,
        )
    most_tokens = max(group.kv_cache_spec.page_tokens for group in groups.kv_cache_groups)
    most_blocks = _MAX_SLOTS // (empty.kv_cache_config.num_rows * most_tokens)
    plan = plan_of(max(0, min(size.num_blocks, most_blocks)), size.reason)
    if plan.num_longest_reqs < 1:
        num_wanted = _NULL_BLOCK + num_longest
        raise KVCacheTooSmallError(
            f"the KV cache is too small for one request of max_model_len={max_model_len}: got "
            f"{plan.kv_cache_config.num_blocks} blocks ({plan.reason}), wanted at least "
            f"{num_wanted} blocks, or {_mib(num_wanted * block_bytes)}. Set a smaller "
            f"max_model_len, or {size.remedy}.",
            max_fitting_len=plan.max_fitting_len,
        )
    return plan


def measure_device_memory(
    devices: Iterable[jax.Device],
    platform: Platform,
    *,
    weight_bytes: int,
    planned_bytes: int,
    activation_bytes: int,
) -> DeviceMemory:
    """Measures the memory of devices, and returns that of the device with the least free memory.

    Args:
        weight_bytes: Bytes of the weights, which are on each device.
        planned_bytes: Bytes of arrays, other than the KV cache, that will be allocated.
        activation_bytes: See `DeviceMemory`.

    Raises:
        ConfigError: A device does not report its memory.
    """
    found = []
    for device in devices:
        stats = device.memory_stats() or {}
        if "bytes_limit" not in stats:
            raise ConfigError(
                f"{device} does not report its memory; set num_gpu_blocks_override instead."
            )
        found.append((stats["bytes_limit"], stats.get("bytes_in_use", 0)))
    limit_bytes, bytes_in_use = min(found, key=lambda sizes: sizes[0] - sizes[1])
    return DeviceMemory(
        total_bytes=platform.total_memory_bytes(limit_bytes),
        limit_bytes=limit_bytes,
        used_bytes=max(weight_bytes, bytes_in_use) + planned_bytes,
        activation_bytes=activation_bytes,
    )


class _Size(NamedTuple):
    """A number of blocks, the reason why there are not more, and how the user can get more."""

    num_blocks: int
    reason: str
    remedy: str


def _size_on_device(memory: DeviceMemory, utilization: float, block_bytes: int) -> _Size:
    usable_bytes = min(memory.total_bytes * utilization, memory.limit_bytes * (1 - _SLACK_SHARE))
    free_bytes = int(usable_bytes) - memory.used_bytes - memory.activation_bytes
    return _Size(
        num_blocks=_rounded_down(free_bytes // block_bytes),
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
    """Decides the size on a CPU.

    Args:
        pool_bytes: `CacheConfig.cpu_kv_cache_bytes`.
        num_longest: Blocks that one request of `max_model_len` tokens needs.
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
    """Returns the default size on a host.

    The useful size is `most_bytes` within the limits above, and at least `longest_bytes`. The pool
    has this size if it is at most `_HOST_SHARE` of the free memory. Otherwise, the share is rounded
    down to a power of two, because programs are compiled for a number of blocks.

    Args:
        longest_bytes: Bytes for one request of `max_model_len` tokens.
        most_bytes: Bytes for `max_num_seqs` such requests.
    """
    useful_bytes = max(longest_bytes, _LEAST_HOST_BYTES, min(_ENOUGH_HOST_BYTES, most_bytes))
    share_bytes = int(free_bytes * _HOST_SHARE)
    if useful_bytes <= share_bytes:
        return useful_bytes
    rounded_bytes = 1 << (share_bytes.bit_length() - 1) if share_bytes else 0
    return max(rounded_bytes, longest_bytes) if longest_bytes <= share_bytes else rounded_bytes


def _rounded_down(num_blocks: int) -> int:
    """Rounds to 7 binary digits.

    Programs are compiled for a number of blocks, and free memory differs a little between starts.
    """
    step = 1 << max(0, num_blocks.bit_length() - 7)
    return num_blocks // step * step


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def report_memory(resident_bytes: int, weight_bytes: int, pool_bytes: int) -> str:
    """Describes the memory of a process on a CPU in one line, for the log.

    Args:
        resident_bytes: Memory of the process after the start. The KV cache takes no memory until
            requests fill it.
    """
    other_bytes = max(0, resident_bytes - weight_bytes)
    return (
        f"memory: {_mib(resident_bytes)} in use after the start, {_mib(weight_bytes)} of it "
        f"weights and {_mib(other_bytes)} programs, libraries and buffers; the KV cache takes up "
        f"to {_mib(pool_bytes)} more as requests fill it"
    )
