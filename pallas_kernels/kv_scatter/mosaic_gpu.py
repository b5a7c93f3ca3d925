"""Mosaic GPU body of `kv_scatter`: a CTA reads a tile of tokens at once and writes each token.

New keys and values are contiguous, so one TMA copy loads a tile of them into shared memory. In the
cache, the keys (or values) of a token are a box with gaps: one row of `head_dim` in each head. One
TMA copy writes it. All copies of a tile run at the same time.
"""

import math
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stored_dtype import BITS_DTYPE
from pallas_kernels.tma_boxes import (
    CTA_TILE_BYTES,
    MAX_BOX_DIM,
    MINOR_BYTES,
    SMEM_ALIGNMENT,
    dtype_misfit,
    widest_minor,
)

# The stores of a tile are unrolled, so it stays small. A guess, not measured.
_MAX_TILE_TOKENS = 16
# Each SM of an H200 gets one token of a short batch before an SM gets a second one.
_NUM_SMS = 132


@dataclass(frozen=True, slots=True, kw_only=True)
class _TokenBox:
    """One token's keys, or values, as a TMA box of 3 axes."""

    num_kv_heads: int
    num_pieces: int  # head_dim = num_pieces * piece_dim, because a box is at most 256 wide
    piece_dim: int
    padded_heads: int  # heads in shared memory, where a token starts at a multiple of 128 bytes
    padded_bytes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_kv_heads, self.num_pieces, self.piece_dim

    @property
    def padded_shape(self) -> tuple[int, int, int]:
        return self.padded_heads, self.num_pieces, self.piece_dim


def misfit(
    kv_cache: jax.Array,
    k: jax.Array,
    v: jax.Array | None,
    slots: jax.Array,
    row: jax.Array | int,
) -> str | None:
    """Why TMA cannot write these tokens; None if it can."""
    del k, row
    if not slots.size:
        return "there is nothing to write"
    if kv_cache.dtype == BITS_DTYPE:
        return f"only XLA on the CPU needs 16-bit floats stored as {BITS_DTYPE}"
    if reason := dtype_misfit(kv_cache.dtype):
        return reason
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    if num_kv_heads > MAX_BOX_DIM:
        return f"a TMA box has at most {MAX_BOX_DIM} heads, got {num_kv_heads=}"
    if widest_minor(head_dim, kv_cache.dtype.itemsize) is None:
        return (
            f"a head must be a multiple of {MINOR_BYTES} bytes for TMA, "
            f"got {head_dim=} of {kv_cache.dtype}"
        )
    num_parts = 1 if v is None else 2
    token_bytes = num_parts * _token_box(kv_cache).padded_bytes
    if token_bytes > CTA_TILE_BYTES:
        return f"a token must fit {CTA_TILE_BYTES} bytes of shared memory, got {token_bytes=}"
    return None


def kv_scatter_mosaic_gpu(
    kv_cache: jax.Array,  # [num_rows, num_parts * num_blocks, num_kv_heads, block_size, head_dim]
    k: jax.Array,  # of the cache's dtype, [num_tokens, num_kv_heads, head_dim]
    v: jax.Array | None,  # like k; None if num_parts is 1
    slots: jax.Array,  # i32[num_tokens]
    row: jax.Array | int,  # i32[]
    *,
    tile_tokens: int | None = None,
    interpret: bool | plgpu.InterpretGPUParams = False,
) -> jax.Array:
    """See `api.kv_scatter`.

    Args:
        tile_tokens: Tokens per CTA, at most `num_tokens`; `None` means the result of
            `_tile_tokens`.
    """
    parts = (k,) if v is None else (k, v)
    num_parts = len(parts)
    num_rows, num_parts_in_row, num_kv_heads, block_size, _ = kv_cache.shape
    num_blocks = num_parts_in_row // num_parts
    (num_tokens,) = slots.shape
    box = _token_box(kv_cache)
    if tile_tokens is None:
        tile_tokens = _tile_tokens(num_tokens, num_parts * box.padded_bytes)
    is_padded = box.padded_heads > num_kv_heads

    def write_tile(
        part_refs: tuple[jax.Ref, ...],  # [num_tokens, *box.shape], in GMEM
        slots_ref: jax.Ref,  # i32[num_tokens], in GMEM
        row_ref: jax.Ref,  # i32[1], in GMEM
        cache_ref: jax.Ref,
        # [num_rows * num_parts * num_blocks, num_kv_heads, block_size, num_pieces, piece_dim]
        tiles: tuple[jax.Ref, ...],  # [tile_tokens, *box.padded_shape], in SMEM
        has_arrived: jax.Ref,  # barrier
    ) -> None:
        first_own = lax.axis_index("tile") * tile_tokens
        # The last tile starts earlier, so that it ends with the last token. It does not write
        # tokens that the tile before it writes: with 10 tokens in tiles of 4, the last tile reads
        # 6..9 and writes 8 and 9.
        first = jnp.minimum(first_own, num_tokens - tile_tokens)
        for part_ref, tile in zip(part_refs, tiles, strict=True):
            if not is_padded:
                plgpu.copy_gmem_to_smem(part_ref.at[pl.ds(first, tile_tokens)], tile, has_arrived)
                continue
            for i in range(tile_tokens):
                in_smem = tile.at[i, pl.ds(0, num_kv_heads)]
                plgpu.copy_gmem_to_smem(part_ref.at[first + i], in_smem, has_arrived)
        # Read before the wait, while the copies run.
        first_block = row_ref[0] * num_blocks
        tile_slots = [slots_ref[first + i] for i in range(tile_tokens)]
        plgpu.barrier_wait(has_arrived)
        for i, slot in enumerate(tile_slots):
            is_real = (slot >= 0) & (slot < num_blocks * block_size)

            @pl.when(is_real & (first + i >= first_own))
            def _(i: int = i, slot: jax.Array = slot) -> None:
                block = first_block + lax.div(slot, jnp.int32(block_size))
                offset = lax.rem(slot, jnp.int32(block_size))
                for part_idx, tile in enumerate(tiles):
                    in_smem = tile.at[i, pl.ds(0, num_kv_heads)]
                    in_cache = cache_ref.at[num_parts * block + part_idx, :, offset]
                    plgpu.copy_smem_to_gmem(in_smem, in_cache)

        # The copies must have read shared memory here; the kernel's end waits for their writes.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    # Rows and blocks are merged, because a box has at most 5 axes. All these views are free.
    flat_dims = num_rows * num_parts_in_row, num_kv_heads, block_size
    cache_ref = jax.new_ref(kv_cache.reshape(*flat_dims, *box.shape[1:]))
    plgpu.kernel(
        write_tile,
        out_type=(),
        scratch_types=[
            num_parts * (plgpu.SMEM((tile_tokens, *box.padded_shape), kv_cache.dtype),),
            plgpu.Barrier(num_arrivals=num_parts * (tile_tokens if is_padded else 1)),
        ],
        grid=(pl.cdiv(num_tokens, tile_tokens),),
        grid_names=("tile",),
        kernel_name="kv_scatter",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams() if interpret is True else interpret,
    )(
        tuple(part.reshape(num_tokens, *box.shape) for part in parts),
        slots,
        jnp.asarray(row, jnp.int32).reshape(1),
        cache_ref,
    )
    return jax.freeze(cache_ref).reshape(kv_cache.shape)


def _token_box(kv_cache: jax.Array) -> _TokenBox:
    _, _, num_kv_heads, _, head_dim = kv_cache.shape
    piece_dim = widest_minor(head_dim, kv_cache.dtype.itemsize)
    head_bytes = head_dim * kv_cache.dtype.itemsize
    # With heads of 160 bytes, 4 heads are the smallest multiple of 128 bytes.
    heads_a_step = SMEM_ALIGNMENT // math.gcd(SMEM_ALIGNMENT, head_bytes)
    padded_heads = pl.cdiv(num_kv_heads, heads_a_step) * heads_a_step
    return _TokenBox(
        num_kv_heads=num_kv_heads,
        num_pieces=head_dim // piece_dim,
        piece_dim=piece_dim,
        padded_heads=padded_heads,
        padded_bytes=padded_heads * head_bytes,
    )


def _tile_tokens(num_tokens: int, token_bytes: int) -> int:
    """Tokens per CTA: as many as fit in its memory, or fewer if some SMs would get none."""
    fitting = min(_MAX_TILE_TOKENS, CTA_TILE_BYTES // token_bytes)
    return min(fitting, pl.cdiv(num_tokens, _NUM_SMS))
