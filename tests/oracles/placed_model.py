"""A model with a KV cache of its own, for tests that run it without a runner."""

import dataclasses

from models import CachePlace, LoadedModel, kv_cache_layers
from paxkv.contracts.kv_cache_spec import KVCacheConfig
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups, groups_of_layers


@dataclasses.dataclass(frozen=True)
class PlacedModel:
    """The model, and the groups that its layers were placed in."""

    model: LoadedModel
    groups: KVCacheGroups

    @property
    def places(self) -> tuple[CachePlace, ...]:
        return self.model.places

    @property
    def num_groups(self) -> int:
        return len(self.groups.kv_cache_groups)

    def cache_config(self, num_blocks: int) -> KVCacheConfig:
        return self.groups.config(num_blocks)


def place_model(model: LoadedModel, *, block_size: int, dtype: str | None = None) -> PlacedModel:
    """Places the layers of a model as the runner does.

    Args:
        dtype: Of keys and values; None is that of the weights.
    """
    layers = kv_cache_layers(model.config)
    dtype = dtype or model.dtype
    groups = groups_of_layers(layers, block_size=block_size, dtype=dtype)
    return PlacedModel(model.with_places(groups.places(layers)), groups)
