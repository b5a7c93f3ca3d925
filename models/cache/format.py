"""`CacheFormat`: what the rest of the program knows of the contents of a page."""

from typing import Literal, Protocol, Self

import jax

from models.cache.self_test import AttentionRules, SelfTest

# The KV cache as it is stored: [num_rows, num_blocks, ...], the page in the trailing axes. Its
# shape and dtype are the platform's (`Platform.page_shape`, `Platform.page_dtype`).
Pages = jax.Array

# The kind decides for which tokens a request holds blocks.
#   full    all tokens of the request
#   window  the tokens in the sliding window of the next token
#   chunk   the tokens of the current chunk
#   latent  all tokens; a page stores one vector per token, which all heads share
#   index   all tokens; a page stores the entries of an index over the tokens
#   state   none; the request has a slot of blocks, whatever its number of tokens
#   cross   the tokens of the encoder
Kind = Literal["full", "window", "chunk", "latent", "index", "state", "cross"]
# The kinds of `AttentionFormat`.
KV_KINDS = ("full", "window", "chunk")


class CacheFormat(Protocol):
    """How one cache of a layer lies in its pages. Frozen and hashable, so static in a program.

    A model's `DecoderSpec` has the formats of whole caches. The runner, and layers in `by_device`,
    use the formats that `on_each_of` returns. Pages and their sizes are always for one device.

    The format, and the layers that use it, read and write the pages. A format without ops of its
    own calls the functions in `models/cache/rules.py`.
    """

    @property
    def kind(self) -> Kind: ...

    @property
    def dtype(self) -> str:
        """Of the numbers in a page. The array that holds them may have another."""

    def on_each_of(self, num_devices: int) -> Self:
        """The part of the cache that each device of a mesh keeps. It may be the whole cache."""

    def page_bytes(self, block_size: int) -> int:
        """Bytes of a page: of a block of `block_size` tokens.

        For a state: of the page that would hold it alone.
        """

    def content_bytes(self, block_size: int) -> int:
        """Bytes of a page that layers fill; the rest is padding."""

    def with_width_step(self, step: int) -> Self:
        """The format of a platform that stores heads in multiples of `step` numbers.

        A format without heads returns itself.
        """

    def self_tests(self, attention: AttentionRules | None, block_size: int) -> tuple[SelfTest, ...]:
        """Tests of the kernels that read and write the pages; none if plain XLA does.

        Args:
            attention: Of the layer that has the cache; None if it has no attention.
        """

    def with_page_bytes(self, page_bytes: int, block_size: int) -> Self | None:
        """The same contents in pages of `page_bytes`; None if they cannot hold it."""
