"""`IndexedLatentConfig`: latent attention to the tokens that an index chooses."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Self

from models.cache.format import CacheFormat
from models.cache.index_format import IndexFormat
from models.config.fields import read_count, refuse_other_values
from models.config.latent_config import LatentAttentionConfig
from models.config.model_config import ModelConfig
from models.errors import ModelConfigError, UnsupportedModelError

# The local name of a layer's cache of index keys.
INDEX_KEYS = "self_attn.indexer"
# The name of index attention in `layer_types`, and its name in older files.
_LAYER_TYPES = ("indexed_attention", "deepseek_sparse_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexConfig:
    """The index of one layer.

    The first `AttentionConfig.rotary` dimensions of its queries and keys are turned.
    """

    num_heads: int
    head_dim: int
    turns_neighbors: bool  # as in `LatentAttentionConfig`


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedLatentConfig(LatentAttentionConfig):
    """Latent attention of one layer to `index_top_k` tokens.

    Args:
        index: None: the layer attends to the tokens that the last layer with an index has chosen.
        attends_to_all: No request can have more than `index_top_k` tokens. Then no layer needs an
            index (`has_index`).
    """

    index_top_k: int
    index: IndexConfig | None
    attends_to_all: bool = False

    def __post_init__(self) -> None:
        # super() without arguments fails here, because `slots=True` creates the class again.
        LatentAttentionConfig.__post_init__(self)
        if self.index is not None and self.index.head_dim < self.rope_dim:
            raise ModelConfigError(
                f"config.json: index_head_dim is {self.index.head_dim}; expected at least "
                f"qk_rope_head_dim={self.rope_dim}, because this number of dimensions is turned."
            )

    @property
    def has_index(self) -> bool:
        """Whether the layer chooses tokens and has a cache of index keys."""
        return self.index is not None and not self.attends_to_all

    def for_length(self, max_model_len: int) -> Self:
        """See `AttentionConfig.for_length`."""
        attends_to_all = max_model_len <= self.index_top_k
        return replace(
            LatentAttentionConfig.for_length(self, max_model_len), attends_to_all=attends_to_all
        )

    def formats(self, kv_dtype: str) -> dict[str, CacheFormat]:
        """See `AttentionConfig.formats`."""
        formats = LatentAttentionConfig.formats(self, kv_dtype)
        if not self.has_index:
            return formats
        keys = IndexFormat.unpadded(key_dim=self.index.head_dim, dtype=kv_dtype)
        return {**formats, INDEX_KEYS: keys}


def with_index(
    config: LatentAttentionConfig, *, index_top_k: int, index: IndexConfig | None
) -> IndexedLatentConfig:
    """The same attention, to chosen tokens only."""
    own = {field.name: getattr(config, field.name) for field in fields(config)}
    return IndexedLatentConfig(**own, index_top_k=index_top_k, index=index)


def read_index(
    hf_config: Mapping[str, object], *, default_num_heads: int, turns_neighbors: bool
) -> IndexConfig:
    """Reads the sizes of an index.

    Raises:
        UnsupportedModelError: The index or its attention turns other pairs of dimensions. The
            attention turns neighbors in all families with an index.
    """
    refuse_other_values(
        hf_config, {"rope_interleave": True, "indexer_rope_interleave": turns_neighbors}
    )
    return IndexConfig(
        num_heads=read_count(hf_config, "index_n_heads", default_num_heads),
        head_dim=read_count(hf_config, "index_head_dim", 128),
        turns_neighbors=turns_neighbors,
    )


def read_has_index(hf_config: Mapping[str, object], num_layers: int) -> list[bool]:
    """For each layer, whether it has an index; other layers use the choice of the last one.

    `indexer_types` has "full" or "shared" for each layer. Without it, `index_topk_pattern` has
    letters or these words. Otherwise every `index_topk_freq`-th layer has an index.

    Raises:
        ModelConfigError: A name is unknown or missing, or the first layer has no index.
    """
    types = hf_config.get("indexer_types")
    if types is None:
        types = hf_config.get("index_topk_pattern")
    if types is None:
        step = max(read_count(hf_config, "index_topk_freq", 1, minimum=0), 1)
        offset = read_count(hf_config, "index_skip_topk_offset", 2, minimum=0)
        has_index = [max(layer_idx - offset + 1, 0) % step == 0 for layer_idx in range(num_layers)]
    else:
        names = {"F": True, "S": False} if isinstance(types, str) else {}
        names |= {"full": True, "shared": False}
        is_list = isinstance(types, str | list) and len(types) == num_layers
        if not is_list or any(name not in names for name in types):
            raise ModelConfigError(
                f"config.json: the layers' indexes are {types!r}; expected a list of {num_layers} "
                "names, 'full' or 'shared', one for each layer."
            )
        has_index = [names[name] for name in types]
    if not has_index[0]:
        raise ModelConfigError(
            "config.json: the first layer shares the index of an earlier one; expected 'full' for "
            "the first layer in indexer_types."
        )
    return has_index


def refuse_other_layer_types(hf_config: Mapping[str, object], num_layers: int) -> None:
    """Checks that every layer has index attention.

    Raises:
        UnsupportedModelError: `layer_types` says that one has not.
    """
    layer_types = hf_config.get("layer_types")
    if layer_types is None:
        return
    is_list = isinstance(layer_types, list) and len(layer_types) == num_layers
    if not is_list or any(name not in _LAYER_TYPES for name in layer_types):
        raise UnsupportedModelError(
            f"config.json: layer_types is {layer_types!r}; paxkv supports 'indexed_attention' for "
            f"each of the {num_layers} layers."
        )


def is_of_unused_index(name: str, config: ModelConfig) -> bool:
    """Whether a tensor belongs to an index, and no layer needs one."""
    attends_to_all = all(layer.attends_to_all for layer in config.attention)
    return attends_to_all and ".indexer." in name
