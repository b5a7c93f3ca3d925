"""Runs decoder layers one after the other: each in the program, or attention once in a loop."""

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
        attended, kv_cache = attention.attend(q, k, v, attention.row, kv_cache, context)
        hidden = layer.after_attention(context.queries_of(hidden), attended)
    return hidden, kv_cache


def run_in_loop(
    layers: Sequence[Layer],
    hidden: jax.Array,  # f[num_tokens, hidden]
    kv_cache: KVCache,
    context: AttentionContext,
) -> tuple[jax.Array, KVCache]:  # f[num_tokens, hidden]
    """The same with a loop over the layers, for `only_last_tokens` unset.

    Most of what a CPU's compiler has to do is attention; so the program holds that once for each
    kind of it, and the products with a layer's own weights as the branches of a switch. The
    weights stay where they are: a scan over stacked ones would copy each layer's out of the stack.
    """
    kinds = {layer.self_attn.kind: layer.self_attn for layer in layers}
    if len(layers) <= len(kinds):
        return run_in_turn(layers, hidden, kv_cache, context)
    kind_names = list(kinds)
    kind_of_layer = jnp.array([kind_names.index(layer.self_attn.kind) for layer in layers])
    row_of_layer = jnp.array([layer.self_attn.row for layer in layers])
    before = [functools.partial(layer.before_attention, context=context) for layer in layers]
    after = [layer.after_attention for layer in layers]
    attend = [functools.partial(attention.attend, context=context) for attention in kinds.values()]

    def run_layer(
        layer_idx: jax.Array, carry: tuple[jax.Array, KVCache]
    ) -> tuple[jax.Array, KVCache]:
        hidden, kv_cache = carry
        q, k, v = jax.lax.switch(layer_idx, before, hidden)
        attended, kv_cache = jax.lax.switch(
            kind_of_layer[layer_idx], attend, q, k, v, row_of_layer[layer_idx], kv_cache
        )
        return jax.lax.switch(layer_idx, after, hidden, attended), kv_cache

    return jax.lax.fori_loop(0, len(layers), run_layer, (hidden, kv_cache))
