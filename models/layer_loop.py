"""Runs decoder layers one after the other: each in the program, or one of each kind in a loop."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from models.chosen_layer import choose_layer
from models.forward_batch import KVCache
from models.layers.attention import Attention, AttentionContext
from models.row_widths import Width


class Layer(Protocol):
    """A decoder layer, in the parts around the one that has no weights."""

    self_attn: Attention

    def before_attention(
        self, hidden: jax.Array, context: AttentionContext
    ) -> tuple[jax.Array, jax.Array, jax.Array]: ...

    def after_attention(self, hidden: jax.Array, attended: jax.Array) -> jax.Array: ...


def run_in_turn(
    layers: Sequence[Layer],
    hidden: jax.Array,  # f[num_tokens, hidden]
    kv_cache: KVCache,
    context: AttentionContext,
) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden], or f[num_reqs, hidden]
    """The program holds every layer. `ForwardBatch.only_last_tokens` is that of the last one."""
    for layer in layers:
        if layer is layers[-1]:
            context = context.of_last_layer()
        attention = layer.self_attn
        q, k, v = _before_attention(layer, hidden, context)
        attended, kv_cache = attention.attend(
            *(q, k, v, kv_cache, context), group_idx=attention.group_idx, row=attention.row
        )
        hidden = _after_attention(layer, hidden, attended, context)
    return hidden, kv_cache


def run_in_loop(
    layers: Sequence[Layer],
    hidden: jax.Array,  # f[num_tokens, hidden]
    kv_cache: KVCache,
    context: AttentionContext,
) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden], or f[num_reqs, hidden]
    """The same with a loop over periods of layers.

    The program holds attention once for each layer of a period, and the work before and behind it
    once or twice (the last layer of all has its own); of the products with layers' own weights it
    holds one for every layer, as the branches of a switch. So it hardly grows with the number of
    layers. The weights stay where they are: a scan over stacked ones would copy each layer's out of
    the stack. The cache is in no branch, because what a switch takes and returns may be copied.
    """
    period = layer_period(layers)
    num_periods = len(layers) // period
    if num_periods < 2:
        return run_in_turn(layers, hidden, kv_cache, context)
    num_looped = num_periods * period
    has_last = num_looped == len(layers)
    loop = LayerLoop(layers[:num_looped], period, context, has_last=has_last)
    hidden, kv_cache = loop.run(hidden, kv_cache)
    if has_last:
        return hidden, kv_cache
    return run_in_turn(layers[num_looped:], hidden, kv_cache, context)


class LayerLoop:
    """Whole periods of layers; those of one place in the period differ in weights and place alone.

    Args:
        has_last: Whether the last of them is the model's, with `ForwardBatch.only_last_tokens`.
    """

    def __init__(
        self, layers: Sequence[Layer], period: int, context: AttentionContext, *, has_last: bool
    ) -> None:
        self._layers = layers
        self._period = period
        self._num_periods = len(layers) // period
        self._context = context
        self._last_context = context.of_last_layer() if has_last else context

    def run(
        self, hidden: jax.Array, kv_cache: KVCache
    ) -> tuple[jax.Array, KVCache]:  # f[num_queries, hidden] of the last layer
        """Runs all of them.

        A turn begins behind the attention of the layer before. So every layer's attention may be
        the same code, also where the last layer goes on with fewer tokens.
        """
        last = self._layers[-1]
        attention = last.self_attn
        num_tokens = hidden.shape[0]
        attended = jnp.zeros((num_tokens, attention.num_q_heads, attention.head_dim), hidden.dtype)

        def run_period(
            period_idx: jax.Array, carry: tuple[jax.Array, jax.Array, KVCache]
        ) -> tuple[jax.Array, jax.Array, KVCache]:
            for place in range(self._period):
                carry = self._run_place(place, period_idx, *carry)
            return carry

        hidden, attended, kv_cache = jax.lax.fori_loop(
            0, self._num_periods, run_period, (hidden, attended, kv_cache)
        )
        return _after_attention(last, hidden, attended, self._last_context), kv_cache

    def _run_place(
        self,
        place: int,
        period_idx: jax.Array,  # i32[]
        hidden: jax.Array,
        attended: jax.Array,
        kv_cache: KVCache,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """The end of the layer before, and the layer of a place up to and with its attention."""
        layers = self._layers[place :: self._period]
        hidden = self._leave(place, period_idx, hidden, attended)
        q, k, v = self._enter(place, period_idx, hidden)
        attended, kv_cache = layers[0].self_attn.attend(
            *(q, k, v, kv_cache, self._context_of(place, period_idx)),
            group_idx=_pick([layer.self_attn.group_idx for layer in layers], period_idx),
            row=_pick([layer.self_attn.row for layer in layers], period_idx),
        )
        return hidden, attended, kv_cache

    def _leave(
        self, place: int, period_idx: jax.Array, hidden: jax.Array, attended: jax.Array
    ) -> jax.Array:  # f[num_tokens, hidden]
        """`Layer.after_attention` of the layer before, if there is one."""
        if place > 0:
            layer = choose_layer(self._layers[place - 1 :: self._period], period_idx)
            return _after_attention(layer, hidden, attended, self._context)
        before = self._layers[self._period - 1 : -1 : self._period]
        layer = choose_layer(before, jnp.maximum(period_idx - 1, 0))
        return _after_attention(layer, hidden, attended, self._context, is_wanted=period_idx > 0)

    def _enter(
        self, place: int, period_idx: jax.Array, hidden: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values of the layer of a place, of all tokens.

        Where it has fewer queries than tokens, zeros stand for the others.
        """
        layers = self._layers[place :: self._period]
        if not self._has_fewer_queries(place):
            return _before_attention(choose_layer(layers, period_idx), hidden, self._context)
        is_last = period_idx == self._num_periods - 1
        room = _room_for_heads(layers[0].self_attn, hidden, hidden.shape[0])
        others = choose_layer(layers[:-1], jnp.minimum(period_idx, len(layers) - 2))
        heads = _project_in(others, hidden, self._context, room, is_wanted=~is_last)
        return _project_in(layers[-1], hidden, self._last_context, heads, is_wanted=is_last)

    def _has_fewer_queries(self, place: int) -> bool:
        """Whether the last layer is of this place, and goes on with fewer tokens."""
        return self._last_context.only_last_tokens and place == self._period - 1

    def _context_of(self, place: int, period_idx: jax.Array) -> AttentionContext:
        """With the tokens that attend; in the last layer they may be fewer, and come first."""
        context, last = self._context, self._last_context
        if not self._has_fewer_queries(place):
            return context
        is_last = period_idx == self._num_periods - 1
        starts = jnp.where(is_last, last.query_start_loc, context.query_start_loc)
        return dataclasses.replace(
            context, batch=dataclasses.replace(context.batch, query_start_loc=starts)
        )


def _before_attention(
    layer: Layer, hidden: jax.Array, context: AttentionContext
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`Layer.before_attention` at the step's width: queries, keys and values."""
    num_queries = context.queries_of(hidden).shape[0]
    room = _room_for_heads(layer.self_attn, hidden, num_queries)
    return _project_in(layer, hidden, context, room)


def _project_in(
    layer: Layer,
    hidden: jax.Array,  # f[num_tokens, hidden]
    context: AttentionContext,
    room: tuple[jax.Array, jax.Array, jax.Array],  # as `_room_for_heads`
    *,
    is_wanted: jax.Array | None = None,  # bool[]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`room` with queries, keys and values written over its first rows."""

    def run(width: Width, room: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        q, k, v = layer.before_attention(width.read(hidden), context.of_width(width.size))
        # With few tokens there may be more rows of queries than that; these belong to nobody.
        parts = q[: room[0].shape[0]], k, v
        return tuple(map(width.write, room, parts))

    return context.batch.at_width(run, room, is_wanted=is_wanted)


def _after_attention(
    layer: Layer,
    hidden: jax.Array,
    attended: jax.Array,
    context: AttentionContext,
    *,
    is_wanted: jax.Array | None = None,  # bool[]
) -> jax.Array:  # f[num_queries, hidden]
    """`Layer.after_attention` at the step's width; `attended` may have rows without a query."""
    if context.only_last_tokens:
        queries = context.queries_of(hidden)
        return layer.after_attention(queries, attended[: queries.shape[0]])

    def run(width: Width, hidden: jax.Array) -> jax.Array:
        out = layer.after_attention(width.read(hidden), width.read(attended))
        return width.write(hidden, out)

    return context.batch.at_width(run, hidden, is_wanted=is_wanted)


def _room_for_heads(
    attention: Attention, hidden: jax.Array, num_queries: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Zeros to write queries, keys and values to; with one width nobody reads them."""
    num_tokens = hidden.shape[0]
    shapes = (
        (num_queries, attention.num_q_heads, attention.head_dim),
        (num_tokens, attention.num_kv_heads, attention.head_dim),
        (num_tokens, attention.num_kv_heads, attention.head_dim),
    )
    return tuple(jnp.zeros(shape, hidden.dtype) for shape in shapes)


def layer_period(layers: Sequence[Layer]) -> int:
    """The least number of layers after which their kinds begin anew."""
    kinds = [layer.self_attn.kind for layer in layers]
    for period in range(1, len(kinds)):
        if kinds[period:] == kinds[:-period]:
            return period
    return max(1, len(kinds))


def _pick(numbers: list[int], idx: jax.Array) -> int | jax.Array:
    """`numbers[idx]`, known to the compiler where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else jnp.array(numbers, jnp.int32)[idx]
