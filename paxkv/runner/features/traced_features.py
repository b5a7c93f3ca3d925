"""`TracedFeatures`: runs the variants of all features inside the program of a step."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp

from models import ForwardBatch, LayerContext, Outputs
from paxkv.errors import InvariantError
from paxkv.runner.shapes.step_variant import StepPart, StepVariant, add_wants

Array = TypeVar("Array", jax.Array, jax.ShapeDtypeStruct)
# For each of `StepShape.features`, arrays by name.
FeatureValues = tuple[Mapping[str, jax.Array], ...]


def split_arrays(
    variants: Sequence[StepVariant], arrays: Sequence[Mapping[str, Array]]
) -> tuple[tuple[dict[str, Array], ...], tuple[dict[str, Array], ...]]:
    """Splits feature arrays into the arrays that a step only reads and the donated arrays.

    Args:
        arrays: For each variant, its feature's arrays by name; may be abstract.

    Returns:
        The arrays that are only read, and the donated arrays, each by variant and name.
    """
    kept, donated = (
        _choose(arrays, [_names(variant, is_donated=is_donated) for variant in variants])
        for is_donated in (False, True)
    )
    return kept, donated


class TracedFeatures:
    """Calls every variant of a shape, in order.

    Args:
        kept: Arrays that the step only reads, for each variant.
    """

    def __init__(
        self,
        variants: Sequence[StepVariant],
        kept: FeatureValues,
        *,
        num_tokens: int,
        num_reqs: int,
    ) -> None:
        self._variants = tuple(variants)
        self._dims = {"num_tokens": num_tokens, "num_reqs": num_reqs}
        self._kept = kept

    def add_wants(self, batch: ForwardBatch) -> ForwardBatch:
        """Returns `batch`, with `wants` that include the outputs that the variants need."""
        return dataclasses.replace(batch, wants=add_wants(batch.wants, self._variants))

    def first_values(self, donated: FeatureValues) -> FeatureValues:
        """Returns the values before the first part: donated arrays, and zeros as results."""
        results = (variant.results(**self._dims) for variant in self._variants)
        return tuple(
            {**arrays, **{name: jnp.zeros(dims, jnp.int32) for name, dims in dims_of.items()}}
            for arrays, dims_of in zip(donated, results, strict=True)
        )

    def apply(self, context: LayerContext, part: StepPart, values: FeatureValues) -> LayerContext:
        """Calls `StepVariant.apply` of every variant for a part of the step."""
        for variant, kept, before in zip(self._variants, self._kept, values, strict=True):
            context = variant.apply(context, part, {**kept, **before})
        return context

    def update(
        self,
        values: FeatureValues,
        outputs: Outputs,
        part: StepPart,
        logits_of: Callable[[jax.Array], jax.Array],
    ) -> FeatureValues:
        """Calls `StepVariant.update` of every variant after a part of the step.

        Raises:
            InvariantError: A variant returns a value that is neither its donated array nor its
                result.
        """
        updated = []
        for variant, kept, before in zip(self._variants, self._kept, values, strict=True):
            changed = variant.update({**kept, **before}, outputs, part, logits_of)
            if changed.keys() - before.keys():
                raise InvariantError(
                    f"{variant} changes {sorted(changed)}; it may change its donated arrays and "
                    f"its results, {sorted(before)}."
                )
            updated.append({**before, **changed})
        return tuple(updated)

    def split(self, values: FeatureValues) -> tuple[FeatureValues, FeatureValues]:
        """Splits the values after the last part into results and donated arrays."""
        results = [variant.results(**self._dims) for variant in self._variants]
        donated = [_names(variant, is_donated=True) for variant in self._variants]
        return _choose(values, results), _choose(values, donated)


NO_FEATURES = TracedFeatures((), (), num_tokens=0, num_reqs=0)


def _names(variant: StepVariant, *, is_donated: bool) -> list[str]:
    arrays = variant.arrays().items()
    return [name for name, array in arrays if array.is_donated == is_donated]


def _choose(
    arrays: Sequence[Mapping[str, Array]], names: Sequence[Iterable[str]]
) -> tuple[dict[str, Array], ...]:
    return tuple(
        {name: of_one[name] for name in names_of_one}
        for of_one, names_of_one in zip(arrays, names, strict=True)
    )
