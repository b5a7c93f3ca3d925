"""`Report`: numbers of layers that a step asks for."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Numbers that layers count while a step asks for them (`LayerContext.report`).

    Args:
        dims: Dimensions of the numbers of one layer.
    """

    name: str
    dims: tuple[int, ...]


def first_reports(reports: Iterable[Report], num_layers: int) -> dict[str, jax.Array]:
    """`LayerContext.reported` before the first layer: zeros for each report."""
    return {report.name: jnp.zeros((num_layers, *report.dims), jnp.int32) for report in reports}
