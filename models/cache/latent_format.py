"""`LatentFormat`: the latents of multi-head latent attention (MLA)."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.cache.latent_self_test import LatentSelfTest
from models.cache.self_test import AttentionRules
from pallas_kernels.page_views import unview_pages, view_pages

# Widened vectors are a multiple of 8 numbers wide: in 16 bits 16 bytes, as the GPU's copies need.
_WIDTH_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentFormat:
    """A page is `[block_size, width]`: for each token a latent, then its rotary key, then padding.

    All heads share the vector, so every device of a mesh stores all of it.

    Args:
        width: Of a stored vector, at least latent_dim + rope_dim.
        dtype: Of the vectors. The array that holds them may have another (`stored_dtype`).
    """

    latent_dim: int
    rope_dim: int
    width: int
    dtype: str
    kind: Literal["latent"] = "latent"

    @classmethod
    def unpadded(cls, *, latent_dim: int, rope_dim: int, dtype: str) -> "LatentFormat":
        width = latent_dim + rope_dim
        return cls(latent_dim=latent_dim, rope_dim=rope_dim, width=width, dtype=dtype)

    def page_bytes(self, block_size: int, num_shards: int = 1) -> int:
        return self.width * block_size * jnp.dtype(self.dtype).itemsize

    def content_bytes(self, block_size: int) -> int:
        width = self.latent_dim + self.rope_dim
        return width * block_size * jnp.dtype(self.dtype).itemsize

    def with_page_bytes(self, page_bytes: int, block_size: int) -> "LatentFormat | None":
        """The format with vectors that fill a page of `page_bytes`; None if no width does it."""
        bytes_per_column = block_size * jnp.dtype(self.dtype).itemsize
        width = page_bytes // bytes_per_column
        if width < self.width or width * bytes_per_column != page_bytes:
            return None
        if width != self.width and width % _WIDTH_STEP:
            return None
        return replace(self, width=width)

    def with_width_step(self, step: int) -> "LatentFormat":
        """The format with vectors widened to the next multiple of `step`."""
        return replace(self, width=math.ceil(self.width / step) * step)

    def self_tests(
        self, attention: AttentionRules | None, block_size: int
    ) -> tuple[LatentSelfTest, ...]:
        if attention is None:
            return ()
        test = LatentSelfTest(
            scale=attention.scale,
            num_q_heads=attention.num_q_heads,
            latent_dim=self.latent_dim,
            rope_dim=self.rope_dim,
            width=self.width,
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
            [num_rows, num_blocks, 1, block_size, width].
        """
        return view_pages(
            pages, num_parts=1, num_kv_heads=1, block_size=block_size, head_dim=self.width
        )

    def unview(self, view: jax.Array, pages: Pages) -> Pages:
        """The inverse of `view`; `pages` says how they are stored."""
        return unview_pages(view, pages.shape)
