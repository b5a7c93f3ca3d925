"""Copies states, and writes the copy back after steps that must not change them."""

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.cache import rules
from models.cache.format import Pages
from models.forward.forward_batch import ForwardBatch, StateInputs
from models.forward.kernel_settings import PAGES_BY_DEVICE, WHOLE, KernelSettings
from models.forward.layer_context import CachePlace, LayerPlaces
from models.weight_rule import MODEL_AXIS

# The blocks of each cache of states, [num_reqs * blocks_per_state, ...], of the pages' dtype.
KeptStates = tuple[jax.Array, ...]
# Each device keeps its own part of every page, as in the cache.
_KEPT_BY_DEVICE = PartitionSpec(None, MODEL_AXIS)


def read_written_states(
    pages: Pages, batch: ForwardBatch, places: Sequence[LayerPlaces], kernels: KernelSettings
) -> KeptStates:
    """Returns a copy of the states that a step has written.

    Later writes to the pages must depend on the result (`rules.after`).

    Args:
        batch: The batch of the step.
        places: The places of the layers' caches.
    """

    def read(pages: Pages, batch: ForwardBatch) -> KeptStates:
        return tuple(
            rules.read_prefix(
                pages, place.row, inputs.write_slots[place.group_idx].reshape(-1), pages.shape[2]
            )
            for place, inputs in _states_of(places, batch)
        )

    kept = kernels.by_device(
        read, pages, batch, in_specs=(PAGES_BY_DEVICE, WHOLE), out_specs=_KEPT_BY_DEVICE
    )
    # A kernel that reads old pages and writes them back would need a copy of all pages.
    return jax.lax.optimization_barrier(kept)


def write_states_back(
    pages: Pages,
    batch: ForwardBatch,
    places: Sequence[LayerPlaces],
    kernels: KernelSettings,
    kept: KeptStates,
) -> Pages:
    """Returns the pages after `kept`, of `read_written_states`, is written to its old blocks."""

    def write(pages: Pages, batch: ForwardBatch, kept: KeptStates) -> Pages:
        for (place, inputs), blocks in zip(_states_of(places, batch), kept, strict=True):
            block_ids = inputs.write_slots[place.group_idx]
            block_ids = jnp.where(inputs.is_written[:, None], block_ids, pages.shape[1])
            pages = rules.write_prefix(pages, place.row, block_ids.reshape(-1), blocks)
        return pages

    return kernels.by_device(
        *(write, pages, batch, kept),
        in_specs=(PAGES_BY_DEVICE, WHOLE, _KEPT_BY_DEVICE),
        out_specs=PAGES_BY_DEVICE,
    )


def _states_of(
    places: Sequence[LayerPlaces], batch: ForwardBatch
) -> Iterator[tuple[CachePlace, StateInputs]]:
    for of_layer in places:
        for _, place in of_layer:
            if place.format.kind == "state":
                yield place, batch.groups[place.inputs_idx]
