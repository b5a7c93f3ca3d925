"""`IndexFormat`: the keys by which index attention chooses tokens."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from models.cache.self_test import AttentionRules, SelfTest
from models.cache.vector_format import VectorFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexFormat(VectorFormat):
    """The vector of a token is its index key.

    Args:
        width_step: The width is a multiple of it.
    """

    key_dim: int
    width_step: int = 1
    kind: Literal["index"] = "index"

    @classmethod
    def unpadded(cls, *, key_dim: int, dtype: str) -> "IndexFormat":
        return cls(key_dim=key_dim, width=key_dim, dtype=dtype)

    @property
    def content_dim(self) -> int:
        return self.key_dim

    def with_page_bytes(self, page_bytes: int, block_size: int) -> "IndexFormat | None":
        """See `VectorFormat.with_page_bytes`. Keys are narrow, so they are widened most."""
        wide = VectorFormat.with_page_bytes(self, page_bytes, block_size)
        return None if wide is None or wide.width % self.width_step else wide

    def with_width_step(self, step: int) -> "IndexFormat":
        """The format with keys widened to the next multiple of `step`."""
        return replace(self, width=math.ceil(self.width / step) * step, width_step=step)

    def self_tests(self, attention: AttentionRules | None, block_size: int) -> tuple[SelfTest, ...]:
        """None, because plain XLA reads the keys. Other formats test `kv_scatter`."""
        return ()
