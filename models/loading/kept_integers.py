"""Makes a `ScaledKernel` of the numbers of a quantized checkpoint. No weight changes."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from models.errors import UnsupportedModelError
from models.loading.quantized.packed_integers import Code, ScaledIntegers, widen_numbers
from models.stored_kernels.scaled import ScaledKernel, fitting_group_size
from models.weight_rule import WeightRule
from pallas_kernels.number_format import MIDDLE, NumberFormat

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
    codes = {source.code for source in sources}
    if len(codes) > 1:
        raise _refusal(rule, f"its parts have the formats {', '.join(sorted(codes))}")
    (code,) = codes
    parts = [source.expand() for source in sources]
    numbers, scales, zeros = (rule.combined([part[idx] for part in parts]) for idx in range(3))
    exact = rule.combined([widen_numbers(*part, code) for part in parts])
    if exact.shape != numbers.shape or not np.array_equal(
        widen_numbers(numbers, scales, zeros, code), exact
    ):
        raise _refusal(rule, "the model computes it from the stored weights")
    group_size = next((size for size in _GROUP_SIZES if _share(size, scales, zeros)), None)
    if group_size is None:
        raise _refusal(
            rule,
            "neighboring inputs do not share scales in groups of 16, 32, 64 or 128 (weights with "
            "activation order do not)",
        )
    in_groups = (*numbers.shape[:-1], -1, group_size)
    numbers, zeros = numbers.reshape(in_groups), zeros.reshape(in_groups)[..., 0]
    scales = scales.reshape(in_groups)[..., 0]
    number_format, numbers, zeros = _in_format(rule, numbers, zeros, code)
    if code != "integer":
        scales = _as_exponents(scales)
    return ScaledKernel.pack(
        jnp.asarray(_outputs_last(numbers, 2)),
        jnp.asarray(_outputs_last(scales, 1)),
        None if zeros is None else jnp.asarray(_outputs_last(zeros, 1)),
        number_format=number_format,
        panel_width=panel_width,
    )


def _in_format(
    rule: WeightRule,
    numbers: np.ndarray,  # [..., num_groups, group_size]
    zeros: np.ndarray,  # [..., num_groups]
    code: Code,
) -> tuple[NumberFormat, np.ndarray, np.ndarray | None]:
    """Numbers and zero points as `ScaledKernel.pack` takes them, and their format."""
    if code != "integer":
        return code, numbers, None
    has_4_bits = min(numbers.min(), zeros.min()) >= 0 and numbers.max() <= _MAX_4_BITS
    if has_4_bits and zeros.max() <= _MAX_4_BITS + 1:
        is_default = (zeros == MIDDLE).all()
        return "int4", numbers.astype(np.uint8), None if is_default else zeros.astype(np.uint8)
    numbers = numbers - zeros[..., None]
    if numbers.min() < -128 or numbers.max() > 127:
        raise _refusal(rule, "its integers need more than 8 bits")
    return "int8", numbers.astype(np.int8), None


def _as_exponents(scales: np.ndarray) -> np.ndarray:  # u8, or the f32 scales themselves
    """The exponents as bytes, if all scales are powers of two; else the scales."""
    bits = np.ascontiguousarray(scales).view(np.uint32)
    exponents = bits >> 23
    is_power = (exponents << 23 == bits) & (exponents > 0) & (exponents < 255)
    return exponents.astype(np.uint8) if is_power.all() else scales


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
