"""Sizes of the Mosaic GPU decode kernel: a table, and a rule for all other cases.

Nothing here was measured. Every number is a guess from registers, shared memory and the calculation
in `mosaic_gpu_decode_kernel.py`. A measured number needs its device, JAX version and command next
to it.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from pallas_kernels.target import default_target

# Most query heads that may share a KV head, by the width of a V tile. Registers hold the logits,
# weights and outputs of these heads; larger groups spill. With up to `_GROUP_OF_TWO_CTAS` heads, a
# thread needs at most 128 registers, so two CTAs fit an SM. Found by compiling for sm_90a with JAX
# 0.11.2 and 0.12.0.
_MAX_GROUP_SIZE = {64: 64, 128: 64, 192: 40, 256: 32, 320: 24, 384: 16, 448: 16, 512: 16}
_GROUP_OF_TWO_CTAS = {64: 24, 128: 16, 192: 16, 256: 8}
# Shared memory in bytes: of an SM, most of a CTA, and reserved by the system per CTA.
# Source: CUDA C++ Programming Guide, compute capability 9.0.
_SMEM_PER_SM, _SMEM_PER_CTA, _SMEM_RESERVED = 233_472, 232_448, 1_024
# Room for barriers, and for the alignment of swizzled tiles.
_SMEM_SLACK = 2_048
_NUM_SMS = {"NVIDIA H200": 132, "NVIDIA H100 80GB HBM3": 132, "NVIDIA H100 PCIe": 114}
_USUAL_NUM_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    """Sizes of the decode kernel."""

    kv_tile: int  # keys per tile, a multiple of 64
    num_stages: int  # tiles per ring, which are loaded ahead
    ctas_per_sm: int  # CTAs that fit in an SM with the sizes above
    num_sms: int  # of the device
    min_share: int  # smallest number of tiles in a share of a split
    # K and V tiles alternate in one ring, which may have an odd number of tiles. For wide heads.
    has_one_ring: bool = False

    @property
    def num_programs(self) -> int:
        """Programs that run at once."""
        return self.num_sms * self.ctas_per_sm

    def reduction_bytes(self, group_rows: int) -> int:
        """Shared memory for maxima over four warps: 1 KiB for every 8 columns."""
        return group_rows // 8 * 1_024

    def smem_bytes(self, itemsize: int, head_dim: int, group_size: int) -> int:
        """An upper bound of a CTA's shared memory."""
        group_rows = padded_rows(group_size)
        widths = head_dim if self.has_one_ring else head_dim + v_tile_width(head_dim)
        tiles = self.num_stages * self.kv_tile * widths
        queries_and_weights = group_rows * (head_dim + self.kv_tile)
        return (
            (tiles + queries_and_weights) * itemsize
            + self.reduction_bytes(group_rows)
            + _SMEM_SLACK
        )


def padded_rows(group_size: int) -> int:
    """Rows that the kernel has for a KV head's queries: wgmma needs a multiple of 8."""
    return -(-group_size // 8) * 8


def v_tile_width(head_dim: int) -> int:
    """Columns of a V tile in shared memory, a multiple of 64: rows of a wgmma result."""
    return -(-head_dim // 64) * 64


def swizzle_width(head_dim: int) -> int:
    """Columns of the widest swizzle (128, 64 or 32 bytes of 2-byte numbers) to divide head_dim."""
    return next(width for width in (64, 32, 16) if head_dim % width == 0)


def max_group_size(head_dim: int) -> int:
    """Largest number of query heads that may share a KV head."""
    return _MAX_GROUP_SIZE[v_tile_width(head_dim)]


_KV_TILE = 64
_MIN_SHARE = 4
_MAX_STAGES = 6

# (device kind, head_dim) -> (num_stages, ctas_per_sm), for 2-byte numbers and groups that leave
# room for two CTAs. All are guesses.
_TUNED = {
    ("NVIDIA H200", 64): (6, 2),  # stages of 16 KiB
    ("NVIDIA H200", 128): (3, 2),  # of 32 KiB
    ("NVIDIA H200", 192): (2, 2),  # of 48 KiB
    ("NVIDIA H200", 256): (3, 1),  # of 64 KiB: two CTAs would have one stage each
}


def decode_config(
    dtype: jnp.dtype,
    head_dim: int,
    group_size: int,
    device_kind: str | None = None,
) -> DecodeConfig:
    """The sizes for a call: from the table if it has them, otherwise as many stages as fit.

    Args:
        device_kind: JAX's name of the device; `None` is JAX's default device. A kind without an
            entry, such as a CPU that compiles for a GPU, uses the H200's entry.
    """
    if device_kind is None:
        device_kind = default_target().device_kind
    num_sms = _NUM_SMS.get(device_kind, _USUAL_NUM_SMS)
    itemsize = jnp.dtype(dtype).itemsize
    key_kind = device_kind if (device_kind, head_dim) in _TUNED else "NVIDIA H200"
    tuned = _TUNED.get((key_kind, head_dim))
    has_room_for_two = group_size <= _GROUP_OF_TWO_CTAS.get(v_tile_width(head_dim), 0)
    stages = range(_MAX_STAGES, 1, -1)
    if tuned is not None and itemsize == 2 and has_room_for_two:
        candidates = [(*tuned, False)]
    else:
        # Prefer two CTAs per SM, if each can have two stages; then the most stages that fit.
        candidates = [(n, 2, False) for n in stages if has_room_for_two]
        candidates += [(n, 1, False) for n in stages]
        if v_tile_width(head_dim) == head_dim:
            candidates += [(n, 1, True) for n in stages]
    for num_stages, ctas_per_sm, has_one_ring in candidates:
        config = DecodeConfig(
            kv_tile=_KV_TILE,
            num_stages=num_stages,
            ctas_per_sm=ctas_per_sm,
            num_sms=num_sms,
            min_share=_MIN_SHARE,
            has_one_ring=has_one_ring,
        )
        room = _SMEM_PER_CTA if ctas_per_sm == 1 else _SMEM_PER_SM // 2 - _SMEM_RESERVED
        if config.smem_bytes(itemsize, head_dim, group_size) <= room:
            return config
    raise ValueError(
        f"no decode tile fits shared memory: got {head_dim=}, {group_size=}, {dtype=}, "
        f"wanted at most {_SMEM_PER_CTA} bytes. Use another implementation."
    )
