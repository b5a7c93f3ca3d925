"""Runs decoder layers one after the other: each in the program, or one of each kind in a loop."""

import functools
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from models.forward_batch import KVCache
from models.layers.attention import Attention, AttentionContext


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
) -> tuple[jax.Array, KVCache]:  # f[num_queries, hidden]
    """The program holds every layer."""
    for layer in layers:
        attention = layer.self_attn
        q, k, v = layer.before_attention(hidden, context)
        attended, kv_cache = attention.attend(
            *(q, k, v, kv_cache, context), group_idx=attention.group_idx, row=attention.row
        )
        hidden = layer.after_attention(context.queries_of(hidden), attended)
    return hidden, kv_cache


def run_in_loop(
    layers: Sequence[Layer],
    hidden: jax.Array,  # f[num_tokens, hidden]
    kv_cache: KVCache,
    context: AttentionContext,
) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden]
    """The same with a loop over periods of layers, for `only_last_tokens` unset.

    Most of what a CPU's compiler has to do is attention; so the program holds that once for each
    layer of a period, and the products with a layer's own weights as the branches of a switch. The
    weights stay where they are: a scan over stacked ones would copy each layer's out of the stack.
    The cache is in no branch, because what a switch takes and returns is copied.
    """
    period = layer_period(layers)
    num_periods = len(layers) // period
    if num_periods < 2:
        return run_in_turn(layers, hidden, kv_cache, context)
    # The layers of each place in the period, one of every period.
    places = [
        LayersOfOneKind(layers[place : num_periods * period : period], context)
        for place in range(period)
    ]

    def run_period(
        period_idx: jax.Array, carry: tuple[jax.Array, KVCache]
    ) -> tuple[jax.Array, KVCache]:
        for place in places:
            carry = place.run(period_idx, *carry)
        return carry

    hidden, kv_cache = jax.lax.fori_loop(0, num_periods, run_period, (hidden, kv_cache))
    return run_in_turn(layers[num_periods * period :], hidden, kv_cache, context)


class LayersOfOneKind:
    """Layers that differ in their weights and their place in the cache alone."""

    def __init__(self, layers: Sequence[Layer], context: AttentionContext) -> None:
        self._before = [
            functools.partial(layer.before_attention, context=context) for layer in layers
        ]
        self._after = [layer.after_attention for layer in layers]
        self._attention = layers[0].self_attn
        self._context = context
        self._group_idxs = [layer.self_attn.group_idx for layer in layers]
        self._rows = [layer.self_attn.row for layer in layers]

    def run(
        self, layer_idx: jax.Array, hidden: jax.Array, kv_cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """Runs the one of the layers that `layer_idx` i32[] names."""
        q, k, v = jax.lax.switch(layer_idx, self._before, hidden)
        attended, kv_cache = self._attention.attend(
            *(q, k, v, kv_cache, self._context),
            group_idx=_pick(self._group_idxs, layer_idx),
            row=_pick(self._rows, layer_idx),
        )
        return jax.lax.switch(layer_idx, self._after, hidden, attended), kv_cache


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
