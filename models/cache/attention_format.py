"""`AttentionFormat`: keys and values of attention."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from models.cache.attention_self_test import AttentionSelfTest
from models.cache.format import Pages
from models.cache.self_test import AttentionRules
from pallas_kernels.page_views import unview_pages, view_pages

# A key and a value.
_NUM_PARTS = 2
# Widened heads are a multiple of 8 numbers wide: in 16 bits 16 bytes, as the GPU's copies need.
_WIDTH_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionFormat:
    """A page is `[keys | values]`, each `[num_kv_heads, block_size, head_dim]`.

    Keys and values have one width. A layer with narrower values pads them: an offset of its own for
    values would need strides that the GPU kernels' copies cannot express.

    Args:
        num_kv_heads: Of one device, after `on_each_of`.
        head_dim: Width of a stored key or value. Layers pad what is narrower, with zeros.
        content_dim: Width of a key and a value together as the layer makes them; None is twice
            `head_dim`.
        dtype: Of keys and values. The array that holds them may have another (`stored_dtype`).
        sliding_window: Positions that a token sees, itself included. With `kind="full"`, the window
            of some layers of a model in which every layer keeps all keys and values.
        chunk_size: Length of chunks; with `kind="full"` as `sliding_window`.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    content_dim: int | None = None
    kind: Literal["full", "window", "chunk"] = "full"
    sliding_window: int | None = None
    chunk_size: int | None = None

    def on_each_of(self, num_devices: int) -> "AttentionFormat":
        """The format with the heads of one device: its part, or a copy of one head."""
        return replace(self, num_kv_heads=max(1, self.num_kv_heads // num_devices))

    def page_bytes(self, block_size: int) -> int:
        width = _NUM_PARTS * self.num_kv_heads * self.head_dim
        return width * block_size * jnp.dtype(self.dtype).itemsize

    def content_bytes(self, block_size: int) -> int:
        if self.content_dim is None:
            return self.page_bytes(block_size)
        width = self.num_kv_heads * self.content_dim
        return width * block_size * jnp.dtype(self.dtype).itemsize

    def with_page_bytes(self, page_bytes: int, block_size: int) -> "AttentionFormat | None":
        """The format with heads so wide that a page has `page_bytes`; None if no width does it."""
        bytes_per_dim = _NUM_PARTS * self.num_kv_heads * block_size * jnp.dtype(self.dtype).itemsize
        head_dim = page_bytes // bytes_per_dim
        if head_dim < self.head_dim or head_dim * bytes_per_dim != page_bytes:
            return None
        if head_dim != self.head_dim and head_dim % _WIDTH_STEP:
            return None
        return replace(self, head_dim=head_dim)

    def with_width_step(self, step: int) -> "AttentionFormat":
        """The format with heads widened to the next multiple of `step`."""
        return replace(self, head_dim=math.ceil(self.head_dim / step) * step)

    def self_tests(
        self, attention: AttentionRules | None, block_size: int
    ) -> tuple[AttentionSelfTest, ...]:
        if attention is None:
            return ()
        test = AttentionSelfTest.of_layer(
            attention,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            block_size=block_size,
            dtype=self.dtype,
        )
        return (test,)

    def kv_dtype(self, pages: Pages) -> jnp.dtype | None:
        """The `kv_dtype` argument of the ops: None if `pages` have the format's own dtype."""
        dtype = jnp.dtype(self.dtype)
        return None if pages.dtype == dtype else dtype

    def view(self, pages: Pages, block_size: int) -> jax.Array:
        """The pages of one device as the ops take them; costs nothing.

        Returns:
            [num_rows, 2 * num_blocks, num_kv_heads, block_size, head_dim]: the keys of block b are
            at 2 * b of the second axis, its values at 2 * b + 1.
        """
        return view_pages(
            pages,
            num_parts=_NUM_PARTS,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_dim=self.head_dim,
        )

    def unview(self, view: jax.Array, pages: Pages) -> Pages:
        """The inverse of `view`; `pages` says how they are stored."""
        return unview_pages(view, pages.shape)
