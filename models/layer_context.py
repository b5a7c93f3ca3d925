"""`LayerContext`: what a layer may ask of the step that it is part of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp

from models.cache.format import CacheFormat, Pages
from models.errors import ModelError
from models.forward_batch import ForwardBatch
from models.kernel_settings import KernelSettings
from models.layers.rotary import rotary_cos_sin
from models.rope_config import RopeConfig
from models.row_widths import Width

Rows = TypeVar("Rows")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where one cache of a layer has its block tables and its memory.

    In a loop over layers, `group_idx` and `row` are traced i32[]: those of the current layer.

    Args:
        inputs_idx: Index into `ForwardBatch.groups`.
        group_idx: Index of the KV cache group in these inputs, in [0, num_groups).
        row: Of the pages, in [0, num_rows).
    """

    format: CacheFormat
    inputs_idx: int
    group_idx: int | jax.Array
    row: int | jax.Array


# The places of a layer's caches, by the caches' local names.
LayerPlaces = tuple[tuple[str, CachePlace], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerCache:
    """One cache of a layer in this step."""

    format: CacheFormat
    row: int | jax.Array  # of the pages
    block_size: int
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    slots: jax.Array  # i32[num_tokens], where each token is written; padding past the pages' end


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The step as one layer sees it; all but `places` and `drops_rows` is shared by all layers."""

    batch: ForwardBatch
    kernels: KernelSettings
    # For each of `batch.groups`, i32[num_groups, num_tokens]: see `LayerCache.slots`.
    slots: tuple[jax.Array, ...]
    # For each `AttentionConfig.rotary`: cosine and sine, f32[num_tokens, rotary_dim // 2].
    cos_sin: Mapping[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]]
    places: LayerPlaces = ()
    # Whether only the last token of each request goes on from here, and attends; the others leave
    # what they write into the cache.
    drops_rows: bool = False

    def at(self, places: LayerPlaces) -> "LayerContext":
        """The context of a layer whose caches have these places."""
        return replace(self, places=places)

    def cache(self, name: str) -> LayerCache:
        """The layer's cache of that local name.

        Raises:
            ModelError: It has none.
        """
        for other, place in self.places:
            if other == name:
                inputs = self.batch.groups[place.inputs_idx]
                return LayerCache(
                    format=place.format,
                    row=place.row,
                    block_size=inputs.block_size,
                    block_tables=inputs.block_tables[place.group_idx],
                    seq_lens=inputs.seq_lens,
                    slots=self.slots[place.inputs_idx][place.group_idx],
                )
        raise ModelError(
            f"the layer asks for its cache {name!r} and has {[other for other, _ in self.places]}. "
            "The model's `DecoderSpec` must list every cache that a layer uses."
        )

    def of_last_layer(self) -> "LayerContext":
        """The context of the last layer, which drops rows that no output needs (`drops_rows`)."""
        return replace(self, drops_rows=self.batch.drops_rows)

    def kept(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_queries, ...]
        """The rows of the tokens that go on from this layer."""
        return x[self.batch.last_tokens] if self.drops_rows else x

    def by_token(self, function: Callable[..., Rows], *rows: jax.Array) -> Rows:
        """`function(*rows)`, of work in which each token has its own rows and sees no other's.

        Rows after the step's tokens may be left out of the work: their results are then zero.

        Args:
            function: Takes and returns arrays, or tuples of them, with tokens as the first axis.
            rows: Arrays with one row for each token of the step, or for each row of `kept`.
        """
        num_tokens, widths = self.batch.token_ids.shape[0], self.batch.widths
        if len(widths) < 2 or rows[0].shape[0] != num_tokens:
            return function(*rows)
        shapes = jax.eval_shape(function, *rows)
        room = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        def run(width: Width, room: Rows) -> Rows:
            return jax.tree.map(width.write, room, function(*map(width.read, rows)))

        return self.batch.at_width(run, room)

    @property
    def num_queries_per_req(self) -> int | None:
        """No request has more tokens that attend; None promises nothing."""
        return 1 if self.drops_rows else self.batch.max_query_len

    @property
    def query_start_loc(self) -> jax.Array:  # i32[num_reqs + 1]
        """`ForwardBatch.query_start_loc` of the tokens that attend."""
        starts = self.batch.query_start_loc
        if not self.drops_rows:
            return starts
        num_used = (starts[1:] > starts[:-1]).sum(dtype=jnp.int32)
        return jnp.minimum(jnp.arange(starts.shape[0], dtype=jnp.int32), num_used)


ContextChange = Callable[[LayerContext], LayerContext]


def make_context(
    batch: ForwardBatch,
    pages: Pages,
    kernels: KernelSettings,
    rotaries: Iterable[tuple[RopeConfig, int]],
) -> LayerContext:
    """What all layers of a model share in a step.

    Args:
        rotaries: `AttentionConfig.rotary` of all layers, each once.
    """
    num_rows, num_blocks = pages.shape[:2]
    slots = tuple(
        kernels.slot_mapping(
            jnp.broadcast_to(
                batch.positions, (inputs.block_tables.shape[0], *batch.positions.shape)
            ),
            inputs.block_tables,
            batch.query_start_loc,
            block_size=inputs.block_size,
            num_rows=num_rows,
            num_blocks=num_blocks,
        )
        for inputs in batch.groups
    )
    cos_sin = {
        (rope, rotary_dim): rotary_cos_sin(batch.positions, rope, rotary_dim)
        for rope, rotary_dim in rotaries
    }
    return LayerContext(batch=batch, kernels=kernels, slots=slots, cos_sin=cos_sin)
