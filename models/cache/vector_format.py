"""`VectorFormat`: what formats with one vector per token share."""

import math
from dataclasses import dataclass, replace
from typing import Self

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from pallas_kernels.page_views import unview_pages, view_pages

# Widened vectors are a multiple of 16 bytes wide, as the GPU's copies need.
_BYTES_STEP = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorFormat:
    """A page is `[block_size, width]`: for each token a vector, then padding.

    All heads share the vector, so every device of a mesh stores all of it.

    Args:
        width: Of a stored vector, at least `content_dim`.
        dtype: Of the vectors. The array that holds them may have another (`stored_dtype`).
    """

    width: int
    dtype: str

    @property
    def content_dim(self) -> int:
        """Width of a vector without padding."""
        raise NotImplementedError(f"{type(self).__name__} must define content_dim")

    def on_each_of(self, num_devices: int) -> Self:
        return self

    def page_bytes(self, block_size: int) -> int:
        return self.width * block_size * jnp.dtype(self.dtype).itemsize

    def content_bytes(self, block_size: int) -> int:
        return self.content_dim * block_size * jnp.dtype(self.dtype).itemsize

    def with_page_bytes(self, page_bytes: int, block_size: int) -> Self | None:
        """The format with vectors that fill a page of `page_bytes`; None if no width does it."""
        itemsize = jnp.dtype(self.dtype).itemsize
        width, num_left = divmod(page_bytes, block_size * itemsize)
        if num_left or width < self.width:
            return None
        if width != self.width and width * itemsize % _BYTES_STEP:
            return None
        return replace(self, width=width)

    def with_width_step(self, step: int) -> Self:
        """The format with vectors widened to the next multiple of `step`."""
        return replace(self, width=math.ceil(self.width / step) * step)

    def kv_dtype(self, pages: Pages) -> jnp.dtype | None:
        """The `kv_dtype` argument of the ops: None if `pages` have the format's own dtype."""
        dtype = jnp.dtype(self.dtype)
        return None if pages.dtype == dtype else dtype

    def view(self, pages: Pages, block_size: int) -> jax.Array:
        """The pages of one device as the ops take them; costs nothing.

        Returns:
            [num_rows, num_blocks, 1, block_size, width].
        """
        return view_pages(
            pages, num_parts=1, num_kv_heads=1, block_size=block_size, head_dim=self.width
        )

    def unview(self, view: jax.Array, pages: Pages) -> Pages:
        """The inverse of `view`; `pages` says how they are stored."""
        return unview_pages(view, pages.shape)
