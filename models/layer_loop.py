"""Runs decoder layers: either a program contains each of them, or equal layers run in a loop."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from models.cache.format import Pages
from models.carry import Carry
from models.chosen_layer import choose_layer, kind_of
from models.layer_context import LayerContext, LayerPlaces


class Layer(Protocol):
    """A decoder layer."""

    def __call__(
        self, carry: Carry, pages: Pages, context: LayerContext
    ) -> tuple[Carry, Pages]: ...


class PlacedLayer(NamedTuple):
    """A layer, its index in the model, and where its caches are."""

    layer: Layer
    layer_idx: int
    places: LayerPlaces

    def run(self, carry: Carry, pages: Pages, context: LayerContext) -> tuple[Carry, Pages]:
        return self.layer(carry, pages, context.at(self.layer_idx, self.places))


# The carry, the cache, and the numbers that layers have reported (`LayerContext.reported`).
_LoopState = tuple[Carry, Pages, dict[str, jax.Array]]


class Stretch(NamedTuple):
    """The layers from `start` to before `end`, which repeat a period of kinds.

    Layers that are `period` apart are of one kind (`kind_of`).
    """

    start: int
    period: int
    num_periods: int

    @property
    def end(self) -> int:
        return self.start + self.period * self.num_periods


def run_in_turn(
    layers: Sequence[PlacedLayer], carry: Carry, pages: Pages, context: LayerContext
) -> tuple[Carry, Pages]:
    """Runs layers one after the other, so the program contains every layer.

    The last layer may return fewer tokens.
    """
    for placed in layers[:-1]:
        carry, pages = placed.run(carry, pages, context)
    return layers[-1].run(carry, pages, context.of_last_layer())


def run_in_loop(
    layers: Sequence[PlacedLayer], carry: Carry, pages: Pages, context: LayerContext
) -> tuple[Carry, Pages]:
    """Runs layers in loops over layers of one kind, or over periods of several kinds.

    The program contains each layer of a period once. Only the products with a layer's own weights
    exist once per layer, as branches of a switch. The program therefore hardly grows with the
    number of layers. The weights stay in place. A scan over stacked weights would copy each layer's
    weights out of the stack. The cache never goes through a switch, because XLA may copy the
    arguments and results of a switch.

    Layers that no loop covers run one after the other, and so does the last layer if it drops rows.
    """
    num_loopable = len(layers) - context.batch.drops_rows
    kinds = [
        (kind_of(placed.layer), _kind_of_places(placed.places)) for placed in layers[:num_loopable]
    ]
    for stretch in find_stretches(kinds):
        part = layers[stretch.start : stretch.end]
        if stretch.num_periods > 1:
            carry, pages = _run_periods(part, stretch.period, carry, pages, context)
        else:
            for placed in part:
                carry, pages = placed.run(carry, pages, context)
    if num_loopable == len(layers):
        return carry, pages
    return run_in_turn(layers[-1:], carry, pages, context)


def _run_periods(
    layers: Sequence[PlacedLayer],
    period: int,
    carry: Carry,
    pages: Pages,
    context: LayerContext,
) -> tuple[Carry, Pages]:
    def run_period(period_idx: jax.Array, state: _LoopState) -> _LoopState:
        *state, reported = state
        own = context.with_reported(reported)
        for start in range(period):
            alike = layers[start::period]
            layer = choose_layer([placed.layer for placed in alike], period_idx)
            places = _pick_places([placed.places for placed in alike], period_idx)
            layer_idx = alike[0].layer_idx + period * period_idx
            state = layer(*state, own.at(layer_idx, places))
        return *state, own.reported

    carry, pages, reported = jax.lax.fori_loop(
        0, len(layers) // period, run_period, (carry, pages, dict(context.reported))
    )
    context.reported.update(reported)
    return carry, pages


def find_stretches(kinds: Sequence[Hashable]) -> list[Stretch]:
    """Cuts layers into stretches that repeat a period, and single layers between them.

    At each start, the stretch is chosen that saves the program the most layers.

    Example: the kinds A B B B C B C -> A | B B B | C | B | C. One stretch has three periods of B.
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


def _kind_of_places(places: LayerPlaces) -> Hashable:
    """The parts of a layer's places that its program depends on: all except the group and row."""
    return tuple((name, place.format, place.inputs_idx) for name, place in places)


def _pick_places(of_layers: Sequence[LayerPlaces], idx: jax.Array) -> LayerPlaces:
    """The places of layer `idx`, for layers whose places are of one kind."""
    picked = []
    for same_cache in zip(*of_layers, strict=True):
        name, first = same_cache[0]
        group_idx = _pick([place.group_idx for _, place in same_cache], idx)
        row = _pick([place.row for _, place in same_cache], idx)
        picked.append((name, replace(first, group_idx=group_idx, row=row)))
    return tuple(picked)


def _pick(numbers: list[int], idx: jax.Array) -> int | jax.Array:
    """`numbers[idx]`; a Python integer if all numbers are equal, so that the compiler knows it."""
    return numbers[0] if len(set(numbers)) == 1 else jnp.array(numbers, jnp.int32)[idx]
