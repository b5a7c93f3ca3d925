"""Runs decoder layers one after the other: each in the program, or those of a kind in a loop."""

from collections.abc import Hashable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from models.carry import Carry
from models.chosen_layer import choose_layer, kind_of
from models.forward_batch import KVCache
from models.layer_context import CachePlace, LayerContext


class Layer(Protocol):
    """A decoder layer."""

    def __call__(
        self, carry: Carry, kv_cache: KVCache, context: LayerContext
    ) -> tuple[Carry, KVCache]: ...


class PlacedLayer(NamedTuple):
    """A layer, and where its cache is."""

    layer: Layer
    place: CachePlace


class Stretch(NamedTuple):
    """Layers `start` to `start + period * num_periods`; those a period apart are of one kind."""

    start: int
    period: int
    num_periods: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.num_periods


def run_in_turn(
    layers: Sequence[PlacedLayer], carry: Carry, kv_cache: KVCache, context: LayerContext
) -> tuple[Carry, KVCache]:
    """The program holds every layer. The last one may go on with fewer tokens."""
    for layer, place in layers[:-1]:
        carry, kv_cache = layer(carry, kv_cache, context.at(place))
    layer, place = layers[-1]
    return layer(carry, kv_cache, context.of_last_layer().at(place))


def run_in_loop(
    layers: Sequence[PlacedLayer], carry: Carry, kv_cache: KVCache, context: LayerContext
) -> tuple[Carry, KVCache]:
    """The same, with loops over layers of one kind, or over periods of several kinds.

    The program holds each layer of a period once; of the products with layers' own weights it holds
    one for every layer, as the branches of a switch. So it hardly grows with the number of layers.
    The weights stay where they are: a scan over stacked ones would copy each layer's out of the
    stack. The cache is in no branch, because what a switch takes and returns may be copied.

    Layers that are like no other run in turn, and so does the last one if it drops rows.
    """
    num_loopable = len(layers) - context.batch.drops_rows
    kinds = [kind_of(layer) for layer, _ in layers[:num_loopable]]
    for stretch in find_stretches(kinds):
        part = layers[stretch.start : stretch.end]
        if stretch.num_periods > 1:
            carry, kv_cache = _run_periods(part, stretch.period, carry, kv_cache, context)
        else:
            for layer, place in part:
                carry, kv_cache = layer(carry, kv_cache, context.at(place))
    if num_loopable == len(layers):
        return carry, kv_cache
    return run_in_turn(layers[-1:], carry, kv_cache, context)


def _run_periods(
    layers: Sequence[PlacedLayer],
    period: int,
    carry: Carry,
    kv_cache: KVCache,
    context: LayerContext,
) -> tuple[Carry, KVCache]:
    def run_period(period_idx: jax.Array, state: tuple[Carry, KVCache]) -> tuple[Carry, KVCache]:
        for start in range(period):
            alike = layers[start::period]
            layer = choose_layer([layer for layer, _ in alike], period_idx)
            place = CachePlace(
                group_idx=_pick([place.group_idx for _, place in alike], period_idx),
                row=_pick([place.row for _, place in alike], period_idx),
            )
            state = layer(*state, context.at(place))
        return state

    return jax.lax.fori_loop(0, len(layers) // period, run_period, (carry, kv_cache))


def find_stretches(kinds: Sequence[Hashable]) -> list[Stretch]:
    """Cuts layers into stretches that repeat a period, and single layers between these.

    Each stretch is the one that saves most layers of the program from where it starts.

    Example: A B B B C B C -> A alone, three times B, C B and C again alone.
    """
    stretches = []
    start = 0
    while start < len(kinds):
        best = Stretch(start, 1, 1)
        for period in range(1, (len(kinds) - start) // 2 + 1):
            found = Stretch(start, period, _count_periods(kinds[start:], period))
            if found.period * (found.num_periods - 1) > best.period * (best.num_periods - 1):
                best = found
        stretches.append(best)
        start = best.end
    return stretches


def _count_periods(kinds: Sequence[Hashable], period: int) -> int:
    num_periods = 1
    while kinds[period * num_periods :][:period] == kinds[:period]:
        num_periods += 1
    return num_periods


def _pick(numbers: list[int], idx: jax.Array) -> int | jax.Array:
    """`numbers[idx]`, known to the compiler where all are the same."""
    return numbers[0] if len(set(numbers)) == 1 else jnp.array(numbers, jnp.int32)[idx]
