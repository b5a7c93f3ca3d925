"""`CacheFormat`: what the rest of the program knows of the contents of a page."""

from typing import Literal, Protocol, Self

import jax

# The KV cache as it is stored: [num_rows, num_blocks, ...], the page in the trailing axes. Its
# shape and dtype are the platform's (`Platform.page_shape`, `Platform.page_dtype`).
Pages = jax.Array

# What decides which blocks a request holds:
#   full    all of its tokens
#   window  those that later tokens still see
#   chunk   those of the last chunk
#   latent  as full; one vector a token for all heads
#   index   as full; what an index over the tokens keeps of each
#   state   one block, whatever the number of tokens
#   cross   the tokens of its encoder
Kind = Literal["full", "window", "chunk", "latent", "index", "state", "cross"]


class CacheFormat(Protocol):
    """How one cache of a layer lies in its pages. Frozen and hashable, so static in a program.

    How pages are read and written is the format's own business and that of the layers that use it.
    A format without ops of its own goes through `models/cache/rules.py`.
    """

    @property
    def kind(self) -> Kind: ...

    def page_bytes(self, block_size: int, num_shards: int = 1) -> int:
        """Bytes of a page: of a block of `block_size` tokens, on one of `num_shards` devices."""

    def content_bytes(self, block_size: int) -> int:
        """Bytes of a page on one device that layers fill; the rest is padding."""

    def with_page_bytes(self, page_bytes: int, block_size: int) -> Self | None:
        """The same contents in pages of `page_bytes` on one device; None if they cannot hold it."""
