"""Computes the prompt of a recurrent op in several calls."""

from collections.abc import Callable, Sequence

import numpy as np


def compute_parts(
    compute: Callable[..., tuple[np.ndarray, np.ndarray]],
    tokens: Sequence[np.ndarray],
    states: np.ndarray,
    positions: np.ndarray,
    cuts: Sequence[int],
) -> tuple[np.ndarray, np.ndarray]:
    """The results of all tokens of one request, and its last state.

    Args:
        compute: Takes tokens, states, `query_start_loc` and positions.
        cuts: Indices of the tokens at which a new call begins.
    """
    # A slice of JAX's arrays would be another program.
    *tokens, positions = map(np.asarray, (*tokens, positions))
    parts = []
    bounds = [0, *cuts, len(positions)]
    for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
        starts = np.array([0, end - begin], np.int32)
        own = [array[begin:end] for array in tokens]
        part, states = compute(*own, states, starts, positions[begin:end])
        parts.append(part)
    return np.concatenate(parts), states
