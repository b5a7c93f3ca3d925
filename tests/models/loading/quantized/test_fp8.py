"""FP8: scales of blocks, rows, tensors and experts."""

import ml_dtypes
import numpy as np
import pytest

from models.errors import ModelConfigError, UnsupportedModelError, WeightMismatchError
from models.loading.quantized.fp8 import Fp8
from tests.models.loading.quantized.quantizers import FP8
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors

NAME = f"{MODULE}.weight"
PER_TENSOR = {"quant_method": "fp8", "activation_scheme": "static"}
E4M3 = ml_dtypes.float8_e4m3fn


def draw(shape):
    rng = np.random.RandomState(0)
    return rng.standard_normal(shape).astype(E4M3), rng


def blocks_of(rows, columns):
    return FP8 | {"weight_block_size": [rows, columns]}


def test_last_blocks_of_an_axis_may_be_smaller(tmp_path):
    weight, rng = draw((5, 7))
    scales = rng.uniform(1, 2, (3, 3)).astype(np.float32)
    parts = {"weight": weight, "weight_scale_inv": scales}
    checkpoint = open_tensors(tmp_path, of_module(parts), blocks_of(2, 3))
    wanted = [
        [np.float32(weight[row, column]) * scales[row // 2, column // 3] for column in range(7)]
        for row in range(5)
    ]
    np.testing.assert_array_equal(checkpoint.read(NAME), wanted)


@pytest.mark.parametrize("scale_dtype", ["float32", "bfloat16", "float8_e8m0fnu", "uint8"])
@pytest.mark.parametrize("shape", [(6, 8), (3, 6, 8)])
def test_blocks_equal_transformers(tmp_path, scale_dtype, shape):
    torch = pytest.importorskip("torch")
    fp8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    weight, rng = draw(shape)
    grid = (*shape[:-2], 3, 2)
    if scale_dtype == "uint8":
        scales = rng.randint(120, 130, grid).astype(np.uint8)
        tensor = torch.from_numpy(scales)
    else:
        scales = (2.0 ** rng.randint(-3, 3, grid)).astype(scale_dtype)
        tensor = torch.from_numpy(scales.astype(np.float32))
    parts = {"weight": weight, "weight_scale_inv": scales}
    checkpoint = open_tensors(tmp_path, of_module(parts), blocks_of(2, 4))
    wanted = fp8.Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(weight.astype(np.float32)), tensor, output_dtype=torch.float32
    )
    np.testing.assert_array_equal(checkpoint.read(NAME), wanted.numpy())


@pytest.mark.parametrize("ending", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize(
    ("shape", "scale_shape", "as_column"),
    [
        ((4, 6), (), (1, 1)),
        ((4, 6), (1,), (1, 1)),
        ((4, 6), (4, 1), (4, 1)),
        ((4, 6), (4,), (4, 1)),
        ((3, 4, 6), (3,), (3, 1, 1)),
        ((3, 4, 6), (3, 1, 1), (3, 1, 1)),
        ((3, 4, 6), (3, 4, 1), (3, 4, 1)),
    ],
)
def test_scales_without_blocks(tmp_path, ending, shape, scale_shape, as_column):
    weight, rng = draw(shape)
    scales = np.asarray(rng.uniform(1, 2, scale_shape), np.float32)
    parts = {"weight": weight, ending: scales}
    checkpoint = open_tensors(tmp_path, of_module(parts), PER_TENSOR)
    wanted = weight.astype(np.float32) * scales.reshape(as_column)
    np.testing.assert_array_equal(checkpoint.read(NAME), wanted)


def test_stacks_of_experts_have_no_ending(tmp_path):
    stack = "model.layers.0.mlp.experts.down_proj"
    weight, rng = draw((3, 4, 6))
    scales = rng.uniform(1, 2, (3, 2, 2)).astype(np.float32)
    tensors = {stack: weight, f"{stack}_scale_inv": scales}
    checkpoint = open_tensors(tmp_path, tensors, blocks_of(2, 3))
    wanted = weight.astype(np.float32) * scales.repeat(2, axis=1).repeat(3, axis=2)
    np.testing.assert_array_equal(checkpoint.read(stack), wanted)


def test_every_code_is_widened(tmp_path):
    codes = np.arange(256, dtype=np.uint8).view(E4M3).reshape(16, 16)
    parts = {"weight": codes, "weight_scale": np.ones((), np.float32)}
    checkpoint = open_tensors(tmp_path, of_module(parts), PER_TENSOR)
    np.testing.assert_array_equal(checkpoint.read(NAME), codes.astype(np.float32))


@pytest.mark.parametrize(
    ("quantization", "parts", "message"),
    [
        (blocks_of(2, 3), {"weight_scale_inv": None}, "without .*up_proj.weight_scale_inv"),
        (blocks_of(2, 3), {"weight_scale_inv": np.ones((2, 2), np.float32)}, r"needs \[3, 3\]"),
        (blocks_of(2, 3), {"weight_scale_inv": np.ones((3, 3), np.int32)}, "has dtype I32"),
        (blocks_of(2, 3), {"weight": np.ones((5, 7), np.int8)}, "dtype I8; .* needs F8_E4M3"),
        (blocks_of(2, 3), {"weight": np.ones((5, 7), np.float32)}, "dtype F32; .* needs F8_E4M3"),
        (PER_TENSOR, {}, r"has shape \[3, 3\]; .* needs \[\] or \[1\] or .* \[5, 1\] or \[5\]"),
    ],
)
def test_tensor_that_does_not_fit_is_named(tmp_path, quantization, parts, message):
    own = {"weight": draw((5, 7))[0], "weight_scale_inv": np.ones((3, 3), np.float32)} | parts
    own = {name: array for name, array in own.items() if array is not None}
    with pytest.raises(WeightMismatchError, match=message):
        open_tensors(tmp_path, of_module(own), quantization)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"weight_block_size": [128]}, ModelConfigError, r"weight_block_size is \[128\]"),
        ({"weight_block_size": [0, 8]}, ModelConfigError, "expected two positive integers"),
        ({"fmt": "e5m2"}, UnsupportedModelError, "fmt is 'e5m2', .* supports 'e4m3'"),
        ({"expert_dtype": "fp4"}, UnsupportedModelError, "expert_dtype is 'fp4'"),
        ({"modules_to_not_convert": "lm_head"}, ModelConfigError, "a list of names of modules"),
        ({"modules_to_not_convert": ["("]}, ModelConfigError, "is not a regular expression"),
    ],
)
def test_other_settings_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Fp8.read(FP8 | fields)
