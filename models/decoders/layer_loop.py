"""Runs decoder layers in turn, or in loops so that a program contains each kind of layer once."""

import collections
import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models.cache.format import Pages
from models.decoders.chosen_layer import choose_layer, kind_of
from models.forward.carry import Carry
from models.forward.layer_context import LayerContext, LayerPlaces


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
    """The layers from `start` to before `end`, as rounds over the kinds that occur among them.

    A round runs some consecutive layers of the first kind, then some of the second, and so on.
    `counts[round_idx][kind_idx]` is the number of these layers; it may be 0.

    Example: the kinds A A B A A B A are the rounds ((2, 1), (2, 1), (1, 0)).
    """

    start: int
    counts: tuple[tuple[int, ...], ...]

    @property
    def end(self) -> int:
        return self.start + sum(map(sum, self.counts))

    def layers_of(self, kind_idx: int) -> list[int]:
        """Indices of the layers of one kind, in order."""
        found = []
        layer_idx = self.start
        for counts in self.counts:
            first = layer_idx + sum(counts[:kind_idx])
            found += range(first, first + counts[kind_idx])
            layer_idx += sum(counts)
        return found


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
    """Runs layers in loops, so that the program contains each kind of layer once.

    Products with a layer's own matrix exist once per layer, as branches of a switch. Matrices and
    experts in a stack need no switch (`models/layers/layer_stack.py`). The program grows with the
    number of kinds, and hardly with the number of layers. The weights stay in place. A scan over
    stacked weights would copy each layer's weights out of the stack. The cache never goes through a
    switch, because XLA may copy the arguments and results of a switch.

    The last layer runs alone if it drops rows.
    """
    num_loopable = len(layers) - context.batch.drops_rows
    kinds = [
        (kind_of(placed.layer), _kind_of_places(placed.places)) for placed in layers[:num_loopable]
    ]
    for stretch in find_stretches(kinds):
        carry, pages = _run_stretch(layers, stretch, carry, pages, context)
    if num_loopable == len(layers):
        return carry, pages
    return run_in_turn(layers[-1:], carry, pages, context)


def _run_stretch(
    layers: Sequence[PlacedLayer],
    stretch: Stretch,
    carry: Carry,
    pages: Pages,
    context: LayerContext,
) -> tuple[Carry, Pages]:
    counts_np = np.array(stretch.counts, np.int32)  # [num_rounds, num_kinds]
    firsts_np = counts_np.cumsum(axis=0) - counts_np
    num_rounds, num_kinds = counts_np.shape
    of_kinds = [
        [layers[layer_idx] for layer_idx in stretch.layers_of(kind_idx)]
        for kind_idx in range(num_kinds)
    ]

    def run_round(round_idx: jax.Array | int, state: _LoopState) -> _LoopState:
        for kind_idx, alike in enumerate(of_kinds):
            first = _pick(firsts_np[:, kind_idx].tolist(), round_idx)
            count = _pick(counts_np[:, kind_idx].tolist(), round_idx)
            state = _run_alike(alike, first, count, state, context)
        return state

    state = (carry, pages, dict(context.reported))
    state = run_round(0, state) if num_rounds == 1 else _repeat(0, num_rounds, run_round, state)
    carry, pages, reported = state
    context.reported.update(reported)
    return carry, pages


def _run_alike(
    alike: Sequence[PlacedLayer],
    first: int | jax.Array,
    count: int | jax.Array,
    state: _LoopState,
    context: LayerContext,
) -> _LoopState:
    """Runs `count` of the layers of one kind, from `alike[first]` on."""

    def run_one(idx: int | jax.Array, state: _LoopState) -> _LoopState:
        carry, pages, reported = state
        own = context.with_reported(reported)
        layer = _pick_layer(alike, idx)
        places = _pick_places([placed.places for placed in alike], idx)
        layer_idx = _pick([placed.layer_idx for placed in alike], idx)
        carry, pages = layer(carry, pages, own.at(layer_idx, places))
        return carry, pages, own.reported

    if isinstance(count, int) and count == 1:
        return run_one(first, state)
    return _repeat(first, first + count, run_one, state)


def _repeat(
    start: int | jax.Array,
    end: int | jax.Array,
    body: Callable[[jax.Array, _LoopState], _LoopState],
    state: _LoopState,
) -> _LoopState:
    return jax.lax.fori_loop(jnp.int32(start), jnp.int32(end), body, state)


def find_stretches(kinds: Sequence[Hashable]) -> list[Stretch]:
    """Cuts layers into stretches such that layers of one kind are in the same stretch.

    Layers of a kind that only occurs in one run, before or after all kinds that return, are a
    stretch of their own. All other layers form one stretch.

    Example: the kinds D A B A B C -> D | A B A B | C.
    """
    runs = [(kind, len(list(alike))) for kind, alike in itertools.groupby(kinds)]
    num_runs = collections.Counter(kind for kind, _ in runs)
    returning = [run_idx for run_idx, (kind, _) in enumerate(runs) if num_runs[kind] > 1]
    begin, end = (returning[0], returning[-1] + 1) if returning else (len(runs), len(runs))
    alone = [[run] for run in runs[:begin]], [[run] for run in runs[end:]]
    parts = [*alone[0], *([runs[begin:end]] if returning else []), *alone[1]]
    stretches = []
    start = 0
    for part in parts:
        stretches.append(Stretch(start, _rounds(part)))
        start = stretches[-1].end
    return stretches


def _rounds(runs: Sequence[tuple[Hashable, int]]) -> tuple[tuple[int, ...], ...]:
    """Puts runs into rounds, the kinds in the order in which they first occur."""
    kind_idxs = {kind: idx for idx, kind in enumerate(dict.fromkeys(kind for kind, _ in runs))}
    rounds: list[list[int]] = []
    last_idx = len(kind_idxs)
    for kind, count in runs:
        kind_idx = kind_idxs[kind]
        if kind_idx <= last_idx:
            rounds.append([0] * len(kind_idxs))
        rounds[-1][kind_idx] = count
        last_idx = kind_idx
    return tuple(map(tuple, rounds))


def _kind_of_places(places: LayerPlaces) -> Hashable:
    """The parts of a layer's places that its program depends on: all except the group and row."""
    return tuple((name, place.format, place.inputs_idx) for name, place in places)


def _pick_layer(alike: Sequence[PlacedLayer], idx: int | jax.Array) -> Layer:
    """The layer `alike[idx]`. A layer that is placed several times is one branch of the switch."""
    distinct = list({id(placed.layer): placed.layer for placed in alike}.values())
    if len(distinct) < len(alike):
        branch_of = {id(layer): branch for branch, layer in enumerate(distinct)}
        idx = _pick([branch_of[id(placed.layer)] for placed in alike], idx)
    return choose_layer(distinct, idx)


def _pick_places(of_layers: Sequence[LayerPlaces], idx: int | jax.Array) -> LayerPlaces:
    """The places of layer `idx`, for layers whose places are of one kind."""
    picked = []
    for same_cache in zip(*of_layers, strict=True):
        name, first = same_cache[0]
        group_idx = _pick([place.group_idx for _, place in same_cache], idx)
        row = _pick([place.row for _, place in same_cache], idx)
        picked.append((name, replace(first, group_idx=group_idx, row=row)))
    return tuple(picked)


def _pick(numbers: list[int], idx: int | jax.Array) -> int | jax.Array:
    """`numbers[idx]`; a Python integer if all numbers are equal, so that the compiler knows it."""
    return numbers[0] if len(set(numbers)) == 1 else jnp.array(numbers, jnp.int32)[idx]
