"""Loads (Q) and stores (output) the 64 rows of a compute warpgroup of the ragged kernel.

A row is a query token of one head: with 4 heads per tile, rows 0..15 are 16 tokens of the first
head, and rows 16..31 the same tokens of the second. wgmma reads tiles of 8 rows. TMA could copy
into these tiles only from every 8th token of the batch, but the rows may begin at any token. So TMA
copies untiled chunks of 64 columns, and the threads rearrange them. The output is stored likewise.
"""

import math
from dataclasses import dataclass

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.ragged_tiles import (
    CHUNK,
    NUM_COMPUTE_WARPGROUPS,
    ROWS_PER_WARPGROUP,
    PlanField,
    RaggedConfig,
    v_part_width,
)

# The softmax is computed in powers of two.
LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class RowTransfer:
    """Copies rows of Q into shared memory and rows of the output out of it."""

    config: RaggedConfig
    head_dim: int
    dtype: str

    @property
    def num_chunks(self) -> int:
        """Number of chunks of one head; the last may be filled in part."""
        return pl.cdiv(self.head_dim, CHUNK)

    @property
    def num_out_chunks(self) -> int:
        """Number of chunks of the output columns that one CTA computes."""
        return pl.cdiv(v_part_width(self.head_dim), CHUNK)

    def chunk_columns(self, chunk: int) -> int:
        """Columns of a chunk that are filled."""
        return min(CHUNK, self.head_dim - chunk * CHUNK)

    @property
    def boxes_per_warpgroup(self) -> int:
        """Number of TMA copies for a warpgroup's Q."""
        return self.config.heads_per_tile * self.num_chunks

    def scratch(self, tiled: tuple[object, ...], is_interpreted: bool) -> object:
        """Shared memory for the Q and output of all compute warpgroups, tiled and in chunks.

        Args:
            tiled: The transforms of the tiles that wgmma reads.
            is_interpreted: Interpret mode reports a race if two warpgroups use different members
                of a union, even if each uses only its own part. So it gets no union.

        Returns:
            Two refs: f[NUM_COMPUTE_WARPGROUPS, 64, head_dim], f[.., num_chunks, 64, CHUNK].
        """
        dtype = jnp.dtype(self.dtype)
        num, rows = NUM_COMPUTE_WARPGROUPS, ROWS_PER_WARPGROUP
        swizzled = (plgpu.SwizzleTransform(CHUNK * dtype.itemsize),)
        q_tiles = plgpu.SMEM((num, rows, self.head_dim), dtype, transforms=tiled)
        chunks = plgpu.SMEM((num, self.num_chunks, rows, CHUNK), dtype, transforms=swizzled)
        # Both share memory if a warpgroup's part begins at the same place in both.
        if self.head_dim % CHUNK == 0 and not is_interpreted:
            return plgpu.RefUnion(q_tiles, chunks)
        return q_tiles, chunks

    def _for_each_box(  # noqa: ANN202
        self,
        copy,  # noqa: ANN001
        tokens_ref,  # noqa: ANN001
        chunks,  # noqa: ANN001
        *,
        first_token,  # noqa: ANN001
        num_tokens,  # noqa: ANN001
        num_chunks,  # noqa: ANN001
        first_column=0,  # noqa: ANN001
        first_row=0,  # noqa: ANN001
    ):
        """Calls copy(GMEM, SMEM) for each head, for boxes of `num_tokens` tokens and 64 columns.

        Token t of head h is row h * tokens_per_warpgroup + t of each chunk.
        """
        first_head = lax.axis_index("head_group") * self.config.heads_per_tile
        for head in range(self.config.heads_per_tile):
            rows = pl.ds(head * self.config.tokens_per_warpgroup + first_row, num_tokens)
            for chunk in range(num_chunks):
                columns = pl.ds(first_column + chunk * CHUNK, CHUNK)
                copy(
                    tokens_ref.at[pl.ds(first_token, num_tokens), first_head + head, columns],
                    chunks.at[chunk, rows],
                )

    def load_queries(self, first_token, q_ref, chunks, q_tile, landed) -> None:  # noqa: ANN001
        """Loads a warpgroup's 64 rows of Q in the order that wgmma reads."""

        def copy(source, target):  # noqa: ANN001, ANN202
            plgpu.copy_gmem_to_smem(source, target, landed)

        boxes = {"num_tokens": self.config.tokens_per_warpgroup, "num_chunks": self.num_chunks}
        self._for_each_box(copy, q_ref, chunks, first_token=first_token, **boxes)
        plgpu.barrier_wait(landed)
        # Chunks and tile may share memory, so all chunks are read before the tile is written.
        values = [
            plgpu.load(chunks.at[chunk], layout=plgpu.Layout.WGMMA)
            for chunk in range(self.num_chunks)
        ]
        for chunk, value in enumerate(values):
            num_columns = self.chunk_columns(chunk)
            q_tile[:, pl.ds(chunk * CHUNK, num_columns)] = value[:, :num_columns]
        plgpu.commit_smem()

    def store_rows(self, plan, carry, out_ref, lse_ref, chunks) -> None:  # noqa: ANN001
        """Writes a warpgroup's rows: all tokens at once, or one by one where the request ends.

        There is no masked store, and the rows after the last token belong to another request.
        """
        out, largest, denominator = carry
        has_seen = denominator > 0.0
        denominator = jnp.where(has_seen, denominator, 1.0)
        for chunk in range(self.num_out_chunks):
            num_columns = self.chunk_columns(chunk)
            piece = out[:, chunk * CHUNK : chunk * CHUNK + num_columns]
            piece *= lax.broadcast_in_dim(1.0 / denominator, piece.shape, [0])
            piece = piece.astype(self.dtype)
            if num_columns < CHUNK:
                unused = jnp.zeros((piece.shape[0], CHUNK - num_columns), piece.dtype)
                piece = jnp.concatenate([piece, unused], axis=1)
            chunks[chunk] = piece
        plgpu.commit_smem()

        tokens = self.config.tokens_per_warpgroup
        warpgroup = lax.axis_index("warpgroup")
        first_token = plan(PlanField.FIRST_TOKEN) + warpgroup * tokens
        num_left = plan(PlanField.NUM_TOKENS) - warpgroup * tokens
        # Wide heads are computed in parts, each by a CTA.
        has_parts = self.num_out_chunks < self.num_chunks
        part = lax.axis_index("v_part") if has_parts else 0
        columns = {
            "num_chunks": self.num_out_chunks,
            "first_column": part * v_part_width(self.head_dim),
        }

        def copy(target, source):  # noqa: ANN001, ANN202
            plgpu.copy_smem_to_gmem(source, target)

        @pl.when(num_left >= tokens)
        def _store_all():  # noqa: ANN202
            boxes = {"first_token": first_token, "num_tokens": tokens}
            self._for_each_box(copy, out_ref, chunks, **boxes, **columns)

        @pl.when((num_left > 0) & (num_left < tokens))
        def _store_one_by_one():  # noqa: ANN202
            @pl.loop(0, num_left)
            def _store_token(token):  # noqa: ANN001, ANN202
                # One row of a swizzled chunk is a box too: TMA swizzles by the address.
                boxes = {"first_token": first_token + token, "num_tokens": 1, "first_row": token}
                self._for_each_box(copy, out_ref, chunks, **boxes, **columns)

        lse = jnp.where(has_seen, largest / LOG2_E + jnp.log(denominator), -jnp.inf)

        def _store_lse():  # noqa: ANN202
            own_lse = lse_ref.at[plan(PlanField.TILE_IDX), lax.axis_index("head_group"), warpgroup]
            _store_to_gmem(own_lse, lse)

        if has_parts:
            pl.when(part == 0)(_store_lse)  # all parts have the same lse
        else:
            _store_lse()
        plgpu.wait_smem_to_gmem(0)


def _store_to_gmem(ref, value):  # noqa: ANN001, ANN202
    """Stores registers straight to global memory.

    TODO: drop when JAX >= 0.12. Older versions do it by a plain store and have no `plgpu.store`.
    """
    if jax.__version_info__ < (0, 12):
        ref[...] = value
    else:
        plgpu.store(ref, value, optimized=False)
