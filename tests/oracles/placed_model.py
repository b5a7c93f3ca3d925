"""A model with a KV cache of its own, for tests that run it without a runner."""

import dataclasses

from models import LayerPlaces, LoadedModel, Pages
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from paxkv.runner.memory.kv_cache_groups import KVCacheGroups, groups_of_spec
from paxkv.runner.shapes.program_shapes import TableShape


@dataclasses.dataclass(frozen=True)
class PlacedModel:
    """The model, and the groups that its layers were placed in."""

    model: LoadedModel
    groups: KVCacheGroups
    kv_dtype: str

    @property
    def places(self) -> tuple[LayerPlaces, ...]:
        return self.model.places

    def tables(self, max_model_len: int) -> tuple[TableShape, ...]:
        return self.groups.tables(max_model_len)

    def empty_pages(self, num_blocks: int) -> Pages:
        config = self.groups.config(num_blocks)
        return empty_kv_cache(config, self.model.platform, self.kv_dtype)


def place_model(
    model: LoadedModel,
    *,
    block_size: int,
    dtype: str | None = None,
    state_dtype: str | None = None,
    num_devices: int = 1,
) -> PlacedModel:
    """Places the layers of a model as the runner does.

    Args:
        dtype: Of keys and values; None is that of the weights.
        state_dtype: Of states; None is that of the model's formats.
        num_devices: Devices that the model is split over.
    """
    kv_dtype = dtype or model.dtype
    spec = model.config.spec(kv_dtype).on_each_of(num_devices)
    spec = spec.with_state_dtypes(window=state_dtype, state=state_dtype)
    groups = groups_of_spec(spec, block_size=block_size, head_dim_step=model.platform.head_dim_step)
    return PlacedModel(model.with_places(groups.places(spec)), groups, kv_dtype)
