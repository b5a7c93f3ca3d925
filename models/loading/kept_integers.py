"""Makes a `ScaledKernel` of the integers of a quantized checkpoint. No weight changes."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from models.errors import UnsupportedModelError
from models.loading.quantized.packed_integers import ScaledIntegers
from models.stored_kernels.scaled import ScaledKernel, fitting_group_size
from models.weight_rule import WeightRule

# The size that takes the least memory comes first.
_GROUP_SIZES = (128, 64, 32, 16)
_MAX_4_BITS = 15


def keep_integers(
    rule: WeightRule, sources: Sequence[ScaledIntegers], *, panel_width: int | None
) -> ScaledKernel:
    """Combines the numbers, scales and zero points of all sources as the rule combines weights.

    Args:
        panel_width: As in `ScaledKernel.pack`.

    Raises:
        UnsupportedModelError: No `ScaledKernel` holds exactly these weights.
    """
    parts = [source.expand() for source in sources]
    numbers, scales, zeros = (rule.combined([part[idx] for part in parts]) for idx in range(3))
    exact = rule.combined([_widen(*part) for part in parts])
    if exact.shape != numbers.shape or not np.array_equal(_widen(numbers, scales, zeros), exact):
        raise _refusal(rule, "the model computes it from the stored weights")
    group_size = next((size for size in _GROUP_SIZES if _share(size, scales, zeros)), None)
    if group_size is None:
        raise _refusal(
            rule,
            "neighboring inputs do not share scales in groups of 16, 32, 64 or 128 (weights with "
            "activation order do not)",
        )
    in_groups = (*numbers.shape[:-1], -1, group_size)
    numbers, zeros = numbers.reshape(in_groups), zeros.reshape(in_groups)[..., :1]
    scales = scales.reshape(in_groups)[..., 0]
    has_4_bits = min(numbers.min(), zeros.min()) >= 0 and numbers.max() <= _MAX_4_BITS
    if has_4_bits and zeros.max() <= _MAX_4_BITS + 1:
        numbers = numbers.astype(np.uint8)
        zeros = (
            None if (zeros == 8).all() else jnp.asarray(_outputs_last(zeros[..., 0], 1), "uint8")
        )
    else:
        numbers, zeros = numbers - zeros, None
        if numbers.min() < -128 or numbers.max() > 127:
            raise _refusal(rule, "its integers need more than 8 bits")
        numbers = numbers.astype(np.int8)
    return ScaledKernel.pack(
        jnp.asarray(_outputs_last(numbers, 2)),
        jnp.asarray(_outputs_last(scales, 1)),
        zeros,
        panel_width=panel_width,
    )


def _widen(numbers: np.ndarray, scales: np.ndarray, zeros: np.ndarray) -> np.ndarray:
    return (numbers - zeros).astype(np.float32) * scales


def _share(group_size: int, *arrays: np.ndarray) -> bool:
    """Whether all inputs of every group have the same numbers."""
    if fitting_group_size(arrays[0].shape[-1], group_size) != group_size:
        return False
    groups = (array.reshape(*array.shape[:-1], -1, group_size) for array in arrays)
    return all((group == group[..., :1]).all() for group in groups)


def _outputs_last(array: np.ndarray, num_axes: int) -> np.ndarray:
    """Moves the axis of outputs, which comes before the `num_axes` last axes, to the end."""
    return np.moveaxis(array, -1 - num_axes, -1)


def _refusal(rule: WeightRule, reason: str) -> UnsupportedModelError:
    names = [source.name for source in rule.sources]
    others = f" and {len(names) - 1} others" if len(names) > 1 else ""
    return UnsupportedModelError(
        f"weight {names[0]}{others} cannot stay quantized: {reason}. Use quantization none, which "
        "widens it."
    )
