"""`BlockIndexedConfig`: attention to the blocks of tokens that an index chooses."""

from dataclasses import dataclass, replace
from typing import Self

from models.cache.format import CacheFormat
from models.cache.index_format import IndexFormat
from models.config.attention_config import AttentionConfig
from models.config.index_config import INDEX_KEYS
from models.errors import ModelConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexConfig:
    """The index of one layer. It scores blocks of `block_len` consecutive tokens.

    Rotary embeddings rotate its queries and keys as `AttentionConfig.rotary` says. These blocks are
    part of the model, and are unrelated to the blocks of the KV cache.
    """

    num_heads: int
    head_dim: int
    block_len: int  # tokens
    num_chosen: int  # blocks that a token attends to, at most
    eps: float  # of the norms of queries and keys


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockIndexedConfig(AttentionConfig):
    """Attention of one layer to chosen blocks, and to the tokens after the last whole block.

    Args:
        attends_to_all: Whether every token attends to all blocks, because no request can have more
            than `BlockIndexConfig.num_chosen`. The layer then has no index.
    """

    index: BlockIndexConfig
    attends_to_all: bool = False

    def __post_init__(self) -> None:
        # super() without arguments fails here, because `slots=True` creates the class again.
        AttentionConfig.__post_init__(self)
        if self.index.head_dim < self.rotary[1]:
            raise ModelConfigError(
                f"config.json: indexer_head_dim is {self.index.head_dim}; expected at least "
                f"{self.rotary[1]}, because rotary embeddings rotate this number of dimensions."
            )

    def for_length(self, max_model_len: int) -> Self:
        """See `AttentionConfig.for_length`."""
        num_blocks = max_model_len // self.index.block_len
        return replace(
            AttentionConfig.for_length(self, max_model_len),
            attends_to_all=num_blocks <= self.index.num_chosen,
        )

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        """See `AttentionConfig.formats`."""
        formats = AttentionConfig.formats(self, kv_dtype)
        if self.attends_to_all:
            return formats
        keys = IndexFormat.unpadded(key_dim=self.index.head_dim, dtype=kv_dtype)
        return {**formats, INDEX_KEYS: keys}
