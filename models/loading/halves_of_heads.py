"""Reorders projections of models that rotate neighboring dimensions, as Llama's first release."""

import numpy as np


def halves_of_heads(weight_np: np.ndarray, num_heads: int) -> np.ndarray:
    """Puts the even rows of each head before the odd ones. Row i then rotates with i + half."""
    in_pairs = weight_np.reshape(num_heads, -1, 2, *weight_np.shape[1:])
    return in_pairs.swapaxes(1, 2).reshape(weight_np.shape)
