"""`LayerContext`: everything that a layer knows about the step."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from models.cache.format import CacheFormat, Pages
from models.config.rope_config import RopeConfig
from models.errors import ModelError
from models.forward.forward_batch import ForwardBatch, GroupInputs, StateInputs
from models.forward.kernel_settings import PAGES_BY_DEVICE, WHOLE, KernelSettings
from models.forward.row_widths import Chunk, Width
from models.layers.rotary import rotary_cos_sin

Arrays = TypeVar("Arrays")


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlace:
    """Where the block tables and the pages of one cache of a layer are.

    In a loop over layers, `group_idx` and `row` are traced i32[] for the current layer.

    Args:
        inputs_idx: Index into `ForwardBatch.groups`.
        group_idx: Index of the KV cache group in these inputs, in [0, num_groups).
        row: Row of the pages, in [0, num_rows).
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
    block_size: int  # tokens of a block on each device
    block_tables: jax.Array  # i32[num_reqs, max_blocks_per_req]
    seq_lens: jax.Array  # i32[num_reqs]
    # i32[num_tokens], where each token is written; padding past the pages' end. Under context
    # parallelism, only the ranks that `ContextRanks.own_slots` chooses write a token.
    slots: jax.Array


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerState:
    """One cache of states of a layer in this step. See `StateInputs` for the arrays."""

    format: CacheFormat
    row: int | jax.Array  # of the pages
    read_slots: jax.Array  # i32[num_reqs, blocks_per_state]
    write_slots: jax.Array  # i32[num_reqs, blocks_per_state]
    starts_from_zero: jax.Array  # bool[num_reqs]
    is_written: jax.Array  # bool[num_reqs]
    query_start_loc: jax.Array  # i32[num_reqs + 1]
    has_one_token_each: bool
    state_ends: jax.Array | None = None  # i32[num_reqs]
    fuses_writes: bool = False  # as `Platform.fuses_state_writes`


@dataclass(frozen=True, slots=True)
class Rows:
    """Says to which tokens the rows of an array belong: by default to all tokens of the step."""

    only_last: bool = False  # one row for each request, for its last token
    # Only some of these rows: the first `width.size`, or a chunk, which starts at a multiple of its
    # size.
    width: Width | Chunk | None = None

    @property
    def first(self) -> int | jax.Array:
        """The index of the first row."""
        return self.width.start if isinstance(self.width, Chunk) else 0


# A function that changes the output of a `Linear`. It takes the layer's name (`Linear.name`), the
# input f[num_rows, in_features], the output f[num_rows, out_features], and the context, whose
# `of_rows` and `layer_idx` identify the tokens of the rows and the layer. It returns the new
# output, which must have the shape and dtype of the old one.
LinearChange = Callable[[str, jax.Array, jax.Array, "LayerContext"], jax.Array]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedEmbeddings:
    """Rows that replace the embeddings of some tokens, such as the tokens of an image."""

    rows: jax.Array  # f[num_tokens, hidden]
    is_replaced: jax.Array  # bool[num_tokens]

    def replace_in(self, hidden: jax.Array) -> jax.Array:  # f[num_tokens, hidden], both
        return jnp.where(self.is_replaced[:, None], self.rows.astype(hidden.dtype), hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContext:
    """The step as a layer, or a part of one, sees it."""

    batch: ForwardBatch
    kernels: KernelSettings
    # For each of `batch.groups`, i32[num_groups, num_tokens]: see `LayerCache.slots`. None for
    # groups of states.
    slots: tuple[jax.Array | None, ...]
    # For each `AttentionConfig.rotary`: cosine and sine, f32[num_tokens, rotary_dim // 2].
    cos_sin: Mapping[tuple[RopeConfig, int], tuple[jax.Array, jax.Array]]
    places: LayerPlaces = ()
    # Whether only the last token of each request attends and goes on from this layer. The layer
    # still writes the keys and values of all tokens.
    drops_rows: bool = False
    # In [0, num_layers), traced in a loop over layers. None: outside of the layers.
    layer_idx: int | jax.Array | None = None
    # The tokens that the rows of the arrays at hand belong to.
    rows: Rows = Rows()
    # The functions by which features change the output of every `Linear`, in order
    # (`add_linear_change`).
    linear_changes: tuple[LinearChange, ...] = ()
    # Embeddings that a feature substitutes; None if there are none.
    embeddings: ReplacedEmbeddings | None = None
    # The numbers that layers have reported so far (`report`), by name: i32[num_layers, *dims]. All
    # contexts of one trace share this dict. It is empty if the step asks for no reports.
    reported: dict[str, jax.Array] = field(default_factory=dict)

    def at(self, layer_idx: int | jax.Array, places: LayerPlaces) -> "LayerContext":
        """The context of layer `layer_idx`, whose caches have these places."""
        return replace(self, layer_idx=layer_idx, places=places)

    def cache(self, name: str) -> LayerCache:
        """The layer's cache of that local name.

        Raises:
            ModelError: The layer has no cache of this name.
        """
        place = self._place(name)
        inputs = self.batch.groups[place.inputs_idx]
        return LayerCache(
            format=place.format,
            row=place.row,
            block_size=inputs.block_size // self.kernels.num_context_ranks,
            block_tables=inputs.block_tables[place.group_idx],
            seq_lens=inputs.seq_lens,
            slots=self.slots[place.inputs_idx][place.group_idx],
        )

    def state(self, name: str) -> LayerState:
        """The layer's cache of states of that local name.

        Raises:
            ModelError: The layer has no cache of this name.
        """
        place = self._place(name)
        inputs = self.batch.groups[place.inputs_idx]
        return LayerState(
            format=place.format,
            row=place.row,
            read_slots=inputs.read_slots[place.group_idx],
            write_slots=inputs.write_slots[place.group_idx],
            starts_from_zero=inputs.starts_from_zero,
            is_written=inputs.is_written,
            query_start_loc=inputs.query_start_loc,
            state_ends=inputs.state_ends,
            has_one_token_each=inputs.has_one_token_each,
            fuses_writes=self.kernels.fuses_state_writes,
        )

    def steps_in_pages(self, state: LayerState) -> bool:
        """Whether `StateFormat.step_op` advances the states in the pages.

        Otherwise, the layer reads arrays of states, and writes them back.

        Batch-invariant steps use the op that also computes prompts, because tokens must have the
        same bits in both.
        """
        kernels = self.kernels
        return (
            state.format.step_op is not None
            and state.has_one_token_each
            and state.fuses_writes
            and kernels.implementation is None
            and not kernels.batch_invariant
        )

    def read_state(
        self, state: LayerState, pages: Pages
    ) -> tuple[jax.Array, ...]:  # [num_reqs, *shape] of each array
        """The layer's states before the step.

        Outside of `by_device`, every device of a mesh must have all of them.
        """
        read = functools.partial(state.format.read, state=state)
        return self.kernels.by_device(read, pages, in_specs=(PAGES_BY_DEVICE,), out_specs=WHOLE)

    def write_state(
        self,
        state: LayerState,
        pages: Pages,
        arrays: tuple[jax.Array, ...],  # [num_reqs, *shape] each
    ) -> Pages:
        """The pages with the layer's states after the step; see `read_state`."""
        return self.kernels.by_device(
            *(lambda pages, arrays: state.format.write(pages, state, arrays), pages, arrays),
            in_specs=(PAGES_BY_DEVICE, WHOLE),
            out_specs=PAGES_BY_DEVICE,
        )

    def _place(self, name: str) -> CachePlace:
        for other, place in self.places:
            if other == name:
                return place
        raise ModelError(
            f"the layer asks for its cache {name!r} and has {[other for other, _ in self.places]}. "
            "The model's `DecoderSpec` must list every cache that a layer uses."
        )

    def of_last_layer(self) -> "LayerContext":
        """The context of the last layer, which drops rows that no output needs (`drops_rows`)."""
        return replace(self, drops_rows=self.batch.drops_rows)

    def with_all_rows(self) -> "LayerContext":
        """The context of a part of a layer whose output is needed for all tokens of the step.

        In the last layer, such a part comes before the part that drops rows.
        """
        return replace(self, drops_rows=False)

    @property
    def num_rows(self) -> int:
        """How many rows the arrays of this context have."""
        if self.rows.width is not None:
            return self.rows.width.size
        return self.batch.num_reqs if self.rows.only_last else self.batch.token_ids.shape[0]

    def is_used(self) -> jax.Array:  # bool[num_rows]
        """For each row of the arrays of this context, whether it has a token and is not padding."""
        starts = self.query_start_loc if self.rows.only_last else self.batch.query_start_loc
        return self.rows.first + jnp.arange(self.num_rows, dtype=jnp.int32) < starts[-1]

    def kept(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_queries, ...]
        """The rows of the tokens that go on from this layer: all rows, except in the last layer.

        Raises:
            ModelError: This context does not have a row for every token, for example because the
                last layer has dropped rows already.
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

    def of(self, chunk: Chunk) -> "LayerContext":
        """The context for arrays with the rows of a chunk. This context must be of all rows."""
        return replace(self, rows=replace(self.rows, width=chunk))

    def _check_all_rows(self) -> None:
        if self.rows != Rows():
            raise ModelError(
                "the last layer keeps rows of an array that has no row for every token of the "
                f"step: its context is of {self.num_rows} of {self.batch.token_ids.shape[0]} rows. "
                "Call `kept` and `of_kept` outside of functions given to `by_token`, and once."
            )

    def of_rows(self, x: jax.Array) -> jax.Array:  # f[num_tokens, ...] -> f[num_rows, ...]
        """The rows of this context (`rows`), taken out of x, which has a row for every token."""
        if self.rows.only_last:
            x = x[self.batch.last_tokens]
        return x if self.rows.width is None else self.rows.width.read(x)

    def by_token(self, function: Callable[..., Arrays], *arrays: jax.Array) -> Arrays:
        """Returns `function(*arrays, context)`, possibly computed without the padding rows.

        The function must compute each token from its own rows alone. It may be called with fewer
        rows than the arrays have, and with a context for these rows. Padding rows that were left
        out are zero in the result. Reports of the function are added to the reports of this
        context.

        Args:
            function: Takes arrays, and returns an array or a tuple of arrays. The first axis of all
                of them is the tokens.
            arrays: With one row for each row of this context. For arrays that `kept` returned, call
                `of_kept().by_token`.

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
        """Applies all changes of features to the output y of the `Linear` of that name.

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
        """The context with one more change, which gets the output of all earlier changes."""
        return replace(self, linear_changes=(*self.linear_changes, change))

    def with_rotary_positions(
        self,
        positions: jax.Array,  # i32[num_axes, num_tokens]
        axis_of_pair: Sequence[int],
    ) -> "LayerContext":
        """The context whose tokens are turned by positions on several axes (M-RoPE).

        The KV cache and masks keep the positions of `batch`.

        Args:
            axis_of_pair: For each pair of rotary dimensions, the axis whose positions turn it.

        Raises:
            ModelError: The model turns another number of pairs.
        """

        def choose(axes: Sequence[jax.Array]) -> jax.Array:  # f32[num_tokens, num_pairs]
            return jnp.stack(axes)[np.array(axis_of_pair), :, np.arange(len(axis_of_pair))].T

        cos_sin = {}
        for rope, rotary_dim in self.cos_sin:
            if len(axis_of_pair) != rotary_dim // 2:
                raise ModelError(
                    f"rotary positions have axes for {len(axis_of_pair)} pairs of dimensions; the "
                    f"model turns {rotary_dim // 2}."
                )
            found = [rotary_cos_sin(of_axis, rope, rotary_dim) for of_axis in positions]
            cos, sin = map(choose, zip(*found, strict=True))
            cos_sin[rope, rotary_dim] = (cos, sin)
        return replace(self, cos_sin=cos_sin)

    def report(self, name: str, count: Callable[[], jax.Array]) -> None:
        """Adds numbers to the layer's report of that name, if the step asks for this report.

        Args:
            count: Returns the numbers, i32[dims of the `Report`]. If the step does not ask for the
                report, it is not called, and adds nothing to the program.

        Raises:
            ModelError: The numbers have another shape or dtype than the report.
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
        # `total.at[...].add` would be a scatter.
        own = jax.lax.dynamic_index_in_dim(total, self.layer_idx, keepdims=False)
        self.reported[name] = jax.lax.dynamic_update_index_in_dim(
            total, own + numbers, self.layer_idx, axis=0
        )

    def with_reported(self, reported: Mapping[str, jax.Array]) -> "LayerContext":
        """The context for an inner trace, such as the body of a loop, with its own dict of reports.

        The loop must carry the values of `reported`. Its body makes this context from them, and
        returns the values that its dict has at the end. The caller of the loop then updates the
        dict of the outer context.
        """
        return replace(self, reported=dict(reported))

    @property
    def scan_positions(self) -> jax.Array | None:  # i32[num_rows]
        """The argument `positions` of recurrent ops: None if each token must have fixed bits."""
        return None if self.kernels.batch_invariant else self.of_rows(self.batch.positions)

    @property
    def num_queries(self) -> int:
        """How many rows attend in this layer, padding included."""
        return self.batch.num_reqs if self.drops_rows else self.batch.token_ids.shape[0]

    @property
    def num_queries_per_req(self) -> int | None:
        """An upper bound of the tokens of one request that attend. None: there is no bound."""
        return 1 if self.drops_rows else self.batch.max_query_len

    @property
    def query_start_loc(self) -> jax.Array:  # i32[num_reqs + 1]
        """`ForwardBatch.query_start_loc`, counted over the tokens that attend."""
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
    """Makes the context that all layers of a model share in a step, with slots, cosines and sines.

    Args:
        rotaries: The different values of `AttentionConfig.rotary` in the model.
    """
    slots = tuple(
        None if isinstance(inputs, StateInputs) else _slots_of(inputs, batch, pages, kernels)
        for inputs in batch.groups
    )
    cos_sin = {
        (rope, rotary_dim): rotary_cos_sin(batch.positions, rope, rotary_dim)
        for rope, rotary_dim in rotaries
    }
    return LayerContext(batch=batch, kernels=kernels, slots=slots, cos_sin=cos_sin)


def _slots_of(
    inputs: GroupInputs, batch: ForwardBatch, pages: Pages, kernels: KernelSettings
) -> jax.Array:  # i32[num_groups, num_tokens]
    num_rows, num_blocks = pages.shape[:2]
    block_size = inputs.block_size // kernels.num_context_ranks
    slots = kernels.slot_mapping(
        jnp.broadcast_to(batch.positions, (inputs.block_tables.shape[0], *batch.positions.shape)),
        inputs.block_tables,
        batch.query_start_loc,
        block_size=block_size,
        num_rows=num_rows,
        num_blocks=num_blocks,
    )
    states = next((other for other in batch.groups if isinstance(other, StateInputs)), None)
    if states is None:
        return slots
    pad_slot = pallas_kernels.pad_slot(num_rows, num_blocks, block_size)
    return jnp.where(states.is_alive_of_tokens(slots.shape[1]), slots, pad_slot)
