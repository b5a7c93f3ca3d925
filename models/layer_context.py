"""`LayerContext`: what a layer may ask of the step that it is part of."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
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

Arrays = TypeVar("Arrays")


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


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens that the rows of some arrays belong to: by default all tokens of the step."""

    only_last: bool = False  # the last token of each request
    width: Width | None = None  # only the first `width.size` of them


# Gives what a `Linear` returns, in place of what it computed. Takes the layer's name
# (`Linear.name`), its input f[num_rows, in_features], what it computed f[num_rows, out_features],
# and the context, whose `of_rows` and `layer_idx` identify the tokens of the rows and the layer.
# It must return the shape and the dtype of what the `Linear` computed.
LinearChange = Callable[[str, jax.Array, jax.Array, "LayerContext"], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The step as a layer, or a part of one, sees it."""

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
    # In [0, num_layers), traced in a loop over layers. None: outside of the layers.
    layer_idx: int | jax.Array | None = None
    # The tokens that the rows of the function's arrays belong to.
    rows: Rows = Rows()
    # What features do to the output of a `Linear`, one after the other (`add_linear_change`).
    linear_changes: tuple[LinearChange, ...] = ()
    # What layers have reported so far (`report`), by name: i32[num_layers, *dims]. All contexts of
    # one trace share this dict. It is empty if the step asks for no reports.
    reported: dict[str, jax.Array] = field(default_factory=dict)

    def at(self, layer_idx: int | jax.Array, places: LayerPlaces) -> "LayerContext":
        """The context of a layer whose caches have these places."""
        return replace(self, layer_idx=layer_idx, places=places)

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

    @property
    def num_rows(self) -> int:
        """Rows of the arrays that belong to `rows`."""
        if self.rows.width is not None:
            return self.rows.width.size
        return self.batch.num_reqs if self.rows.only_last else self.batch.token_ids.shape[0]

    def is_used(self) -> jax.Array:  # bool[num_rows]
        """Which rows of `rows` belong to a token; the others are padding."""
        starts = self.query_start_loc if self.rows.only_last else self.batch.query_start_loc
        return jnp.arange(self.num_rows, dtype=jnp.int32) < starts[-1]

    def kept(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_queries, ...]
        """The rows of the tokens that go on from this layer.

        Raises:
            ModelError: The last layer, which drops rows, has dropped some already.
        """
        if not self.drops_rows:
            return x
        self._check_all_rows()
        return x[self.batch.last_tokens]

    def of_kept(self) -> "LayerContext":
        """The context for arrays that `kept` returned.

        Raises:
            ModelError: As `kept`.
        """
        if not self.drops_rows:
            return self
        self._check_all_rows()
        return replace(self, rows=Rows(only_last=True))

    def _check_all_rows(self) -> None:
        if self.rows != Rows():
            raise ModelError(
                "the last layer keeps rows of an array that has no row for every token of the "
                f"step: its context is of {self.num_rows} of {self.batch.token_ids.shape[0]} rows. "
                "Call `kept` and `of_kept` outside of functions given to `by_token`, and once."
            )

    def of_rows(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_rows, ...]
        """The rows of x, which has one for each token of the step, that belong to `rows`."""
        if self.rows.only_last:
            x = x[self.batch.last_tokens]
        return x if self.rows.width is None else self.rows.width.read(x)

    def by_token(self, function: Callable[..., Arrays], *arrays: jax.Array) -> Arrays:
        """`function(*arrays, context)`, where each token is computed from its own rows alone.

        Rows after the step's tokens may be left out of the work; their results are then zero. The
        function gets fewer rows then, and the context of these. What it reports counts.

        Args:
            function: Takes and returns arrays, or tuples of them, with tokens as the first axis.
            arrays: With one row for each token of `rows`. For arrays that `kept` returned, call
                this method of `of_kept()`.

        Raises:
            ModelError: An array has another number of rows.
        """
        for array in arrays:
            if array.shape[0] != self.num_rows:
                raise ModelError(
                    f"`by_token` got an array of shape {array.shape}, and its context is of "
                    f"{self.num_rows} rows. Arrays from `kept` need the context `of_kept()`."
                )
        if len(self.batch.widths) < 2 or self.rows != Rows():
            return function(*arrays, self)
        silent = self.with_reported({})
        shapes = jax.eval_shape(lambda *arrays: function(*arrays, silent), *arrays)
        room = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)

        def run(
            width: Width, state: tuple[Arrays, dict[str, jax.Array]]
        ) -> tuple[Arrays, dict[str, jax.Array]]:
            room, reported = state
            own = replace(self.with_reported(reported), rows=Rows(width=width))
            room = jax.tree.map(width.write, room, function(*map(width.read, arrays), own))
            return room, own.reported

        room, reported = self.batch.at_width(run, (room, dict(self.reported)))
        self.reported.update(reported)
        return room

    def changed_linear(
        self,
        name: str,
        x: jax.Array,  # f[num_rows, in_features]
        y: jax.Array,  # f[num_rows, out_features]
    ) -> jax.Array:  # f[num_rows, out_features]
        """What the `Linear` of that name returns, which computed y from x.

        Raises:
            ModelError: A change returns another shape or dtype.
        """
        for change in self.linear_changes:
            changed = change(name, x, y, self)
            if (changed.shape, changed.dtype) != (y.shape, y.dtype):
                raise ModelError(
                    f"a step feature changed what the Linear {name!r} returns from "
                    f"{y.dtype}{list(y.shape)} to {changed.dtype}{list(changed.shape)}. "
                    "A change must keep shape and dtype."
                )
            y = changed
        return y

    def add_linear_change(self, change: LinearChange) -> "LayerContext":
        """The context where `change` gets what all changes before it returned."""
        return replace(self, linear_changes=(*self.linear_changes, change))

    def report(self, name: str, count: Callable[[], jax.Array]) -> None:
        """Adds numbers to what the layer has reported under that name, if the step asks for them.

        Args:
            count: Returns i32[dims of the `Report`]. It is not called if nothing asks, so that the
                program stays as it is.

        Raises:
            ModelError: The numbers are of another shape or dtype.
        """
        if name not in self.reported:
            return
        total, numbers = self.reported[name], count()
        if (numbers.shape, numbers.dtype) != (total.shape[1:], total.dtype):
            raise ModelError(
                f"a layer reports {numbers.dtype}{list(numbers.shape)} as {name!r}; the step asks "
                f"for {total.dtype}{list(total.shape[1:])}. The `Report` must have the dimensions "
                "of what the layer counts."
            )
        # Not `total.at[...].add`, which would be a scatter.
        own = jax.lax.dynamic_index_in_dim(total, self.layer_idx, keepdims=False)
        self.reported[name] = jax.lax.dynamic_update_index_in_dim(
            total, own + numbers, self.layer_idx, axis=0
        )

    def with_reported(self, reported: Mapping[str, jax.Array]) -> "LayerContext":
        """The context of an inner trace, such as the body of a loop, with a dict of its own.

        The body must take `reported` from outside as a value and return the dict's values at its
        end. The caller then updates the dict of the outer context with them.
        """
        return replace(self, reported=dict(reported))

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
