"""Integers of checkpoints are kept exactly, or refused with the reason."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest

from models.errors import UnsupportedModelError
from models.loading.kept_integers import keep_integers
from models.loading.quantized.packed_integers import ScaledIntegers
from models.weight_rule import Source, WeightRule
from tests.models.stored_kernels.dequantized import dequantized

OUT, IN, GROUP_SIZE = 20, 64, 32
RULE = WeightRule(sources=(Source(name="w", shape=(OUT, IN)),), layout="matrix", axes=(None, None))


def draw_integers(low: int, high: int, zeros: np.ndarray | int) -> ScaledIntegers:
    rng = np.random.default_rng(0)
    return ScaledIntegers(
        numbers=rng.integers(low, high + 1, (OUT, IN)),
        scales=rng.random((OUT, IN // GROUP_SIZE)).astype(np.float16),
        zeros=zeros,
        group_size=GROUP_SIZE,
    )


def own_zeros(high: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, high + 1, (OUT, IN // GROUP_SIZE))


@pytest.mark.parametrize(
    ("integers", "bytes_per_number", "has_zeros"),
    [
        (draw_integers(0, 15, 8), 0.5, False),
        # Version 1 of GPTQ stores zero points of 1 to 16.
        (draw_integers(0, 15, own_zeros(16)), 0.5, True),
        (draw_integers(-128, 127, 0), 1, False),
        (draw_integers(0, 255, 128), 1, False),
        # GPTQ without activation order may name the groups of neighbors.
        (
            dataclasses.replace(draw_integers(0, 15, 8), group_idx=np.arange(IN) // GROUP_SIZE),
            0.5,
            False,
        ),
    ],
)
def test_integers_stand_for_the_same_weights(integers, bytes_per_number, has_zeros):
    kernel = keep_integers(RULE, [integers], panel_width=16)
    exact = dataclasses.replace(integers, numbers=integers.numbers.copy()).dequantize()
    np.testing.assert_array_equal(dequantized(kernel), exact.T)
    # Two panels of 16 columns.
    assert kernel.numbers.nbytes == IN * 32 * bytes_per_number
    assert (kernel.zeros is not None) == has_zeros


@pytest.mark.parametrize(
    ("block_size", "num_scales"), [((6, 32), (4, 2)), ((1, None), (OUT, 1)), ((OUT, None), (1, 1))]
)
def test_floats_with_scales_of_blocks_rows_or_a_tensor_stand_for_the_same_weights(
    block_size, num_scales
):
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((OUT, IN)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.random(num_scales).astype(np.float32)
    block_rows, group_size = block_size
    floats = ScaledIntegers(
        numbers=weight.view(np.uint8),
        scales=scales,
        group_size=group_size,
        block_rows=1 if num_scales[0] == 1 else block_rows,
        code="e4m3",
    )
    kernel = keep_integers(RULE, [floats], panel_width=16)
    exact = np.zeros((OUT, IN), np.float32)
    for row, column in np.ndindex(exact.shape):
        scale = scales[row // block_rows, column // (group_size or IN)]
        exact[row, column] = np.float32(weight[row, column]) * scale
    np.testing.assert_array_equal(dequantized(kernel), exact.T)
    assert kernel.numbers.nbytes == IN * 32


def test_sources_of_two_formats_are_refused():
    integers = draw_integers(0, 15, 8)
    floats = dataclasses.replace(integers, zeros=0, code="e2m1")
    rule = dataclasses.replace(RULE, sources=RULE.sources * 2, combine=np.concatenate)
    with pytest.raises(UnsupportedModelError, match="its parts have the formats e2m1, integer"):
        keep_integers(rule, [integers, floats], panel_width=16)


def test_stacks_and_parts_of_weights_are_kept():
    pair = [draw_integers(0, 15, own_zeros(15)), draw_integers(0, 15, 8)]
    exact = np.stack([integers.dequantize() for integers in pair])[:, 5:15]
    rule = dataclasses.replace(
        RULE, sources=RULE.sources * 2, combine=lambda arrays: np.stack(arrays)[:, 5:15]
    )
    kernel = keep_integers(rule, pair, panel_width=None)
    np.testing.assert_array_equal(dequantized(kernel), exact.swapaxes(1, 2))


@pytest.mark.parametrize(
    ("integers", "changes", "reason"),
    [
        (draw_integers(0, 15, 8), {"combine": lambda arrays: arrays[0] + 1}, "computes it from"),
        (draw_integers(0, 15, 8), {"combine": lambda arrays: arrays[0][:, 1:]}, "do not share"),
        (draw_integers(0, 255, own_zeros(255)), {}, "more than 8 bits"),
    ],
)
def test_other_weights_are_refused(integers, changes, reason):
    rule = dataclasses.replace(RULE, **changes)
    with pytest.raises(UnsupportedModelError, match=rf"weight w cannot stay quantized: .*{reason}"):
        keep_integers(rule, [integers], panel_width=16)
