"""compressed-tensors: packed integers, integers and floats, with all kinds of scales."""

import ml_dtypes
import numpy as np
import pytest

from models.errors import ModelConfigError, UnsupportedModelError, WeightMismatchError
from models.loading.quantized.compressed_tensors import CompressedTensors
from tests.models.loading.quantized.quantizers import PACKED, as_packed, compressed
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors, pack

NAME = f"{MODULE}.weight"
E4M3 = ml_dtypes.float8_e4m3fn


def test_golden_groups_of_packed_int4(tmp_path):
    # compressed-tensors 0.20.0, `PackedQuantizationCompressor.compress`: 10 outputs, 8 inputs.
    words = [962156583, -733338519, -1215602987, 351407191, 1950886219]
    words += [-1618084815, -1992881100, 1671096236, -713444172, -1376052244]
    parts = {
        "weight_packed": np.array(words, np.int32).reshape(10, 1),
        "weight_scale": np.array([[0.5, 1], [2, 4]] * 5, np.float32),
        "weight_zero_point": np.array([[1127233269, -669386400], [213, 104]], np.int32),
        "weight_shape": np.array([10, 8]),
    }
    twice = [
        [2, -3, 3, 0, 18, 10, 18, 6],
        [-24, -36, -44, -52, 32, -16, -16, 56],
        [-1, 7, 8, -1, 4, -2, -4, 4],
        [16, 8, 36, -12, -104, 0, -88, -112],
        [11, 4, 9, 2, -2, -10, -10, -4],
        [-8, 0, 36, 48, 96, 56, 112, 64],
        [1, 0, 9, -3, -2, -10, 2, 0],
        [32, 24, 12, 40, -24, -32, -80, -56],
        [-1, 6, -1, 6, 2, -2, -6, 10],
        [-4, 4, -8, -48, 40, 72, 56, 32],
    ]
    quantization = compressed(
        "pack-quantized", num_bits=4, strategy="group", group_size=4, symmetric=False
    )
    checkpoint = open_tensors(tmp_path, of_module(parts), quantization)
    assert {name: w.shape for name, w in checkpoint.weights.items()} == {NAME: (10, 8)}
    np.testing.assert_array_equal(2 * checkpoint.read(NAME), twice)


def test_golden_channels_of_packed_int8(tmp_path):
    words = [-1189641793, -1974294617, 745944550, 1633877610, 1793555714]
    parts = {
        "weight_packed": np.array(words, np.int32).reshape(5, 1),
        "weight_scale": np.array([[0.5], [1], [2], [4], [0.5]], np.float32),
        "weight_zero_point": np.array([[1772074448], [209]], np.int32),
    }
    twice = [
        [-17, -79, -185, -23],
        [-28, -28, -198, -86],
        [284, -424, -164, -460],
        [8, 1192, -56, -64],
        [-207, -84, 22, -103],
    ]
    quantization = compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=False)
    weight = open_tensors(tmp_path, of_module(parts), quantization).read(NAME)
    np.testing.assert_array_equal(2 * weight, twice)


def test_golden_channels_of_symmetric_int4(tmp_path):
    parts = {
        "weight_packed": np.array([[-1705065515], [-354750947]], np.int32),
        "weight_scale": np.array([[0.5], [1]], np.float32),
    }
    twice = [[-3, 5, -5, 4, 6, -3, 2, 1], [10, -14, 12, 12, 4, 10, 4, 12]]
    quantization = compressed("pack-quantized", num_bits=4, strategy="channel", symmetric=True)
    weight = open_tensors(tmp_path, of_module(parts), quantization).read(NAME)
    np.testing.assert_array_equal(2 * weight, twice)


# Strategy -> its fields, the shape of scales of a matrix [6, 8], and the scale of each number.
STRATEGIES = {
    "tensor": ({}, (1,), lambda row, column: (0,)),
    "channel": ({}, (6, 1), lambda row, column: (row, 0)),
    "group": ({"group_size": 4}, (6, 2), lambda row, column: (row, column // 4)),
    "block": ({"block_structure": [4, 3]}, (2, 3), lambda row, column: (row // 4, column // 3)),
}


LAYOUTS = [
    ("int-quantized", "int"),
    ("naive-quantized", "int"),
    ("float-quantized", "float"),
    ("pack-quantized", "int"),
]


@pytest.mark.parametrize(
    ("strategy", "layout", "kind", "is_symmetric"),
    [(strategy, *layout, True) for strategy in STRATEGIES for layout in LAYOUTS]
    + [(strategy, "int-quantized", "int", False) for strategy in ("tensor", "channel", "group")],
)
def test_scale_and_zero_point_of_each_number(tmp_path, strategy, layout, kind, is_symmetric):
    fields, shape, place = STRATEGIES[strategy]
    rng = np.random.RandomState(0)
    if kind == "float":
        numbers = rng.standard_normal((6, 8)).astype(E4M3)
    else:
        numbers = rng.randint(-128, 128, (6, 8)).astype(np.int8)
    scales = rng.uniform(1, 2, shape).astype(ml_dtypes.bfloat16)
    zeros = rng.randint(-128, 128, shape).astype(np.int8)
    parts = {"weight": numbers, "weight_scale": scales}
    if layout == "pack-quantized":
        parts["weight_packed"] = pack(parts.pop("weight").astype(int) + 128, 8)
    # Old releases store zero points of symmetric weights, too.
    parts["weight_zero_point"] = zeros
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": is_symmetric}
    quantization = compressed(layout, **weights, **fields)
    weight = open_tensors(tmp_path, of_module(parts), quantization).read(NAME)
    for row, column in np.ndindex(6, 8):
        number = np.float32(numbers[row, column])
        if not is_symmetric:
            number -= np.float32(zeros[place(row, column)])
        assert weight[row, column] == number * np.float32(scales[place(row, column)])


@pytest.mark.parametrize("is_set", [True, False])
def test_groups_in_activation_order(tmp_path, is_set):
    rng = np.random.RandomState(0)
    numbers, scales = rng.randint(-8, 8, (6, 8)), rng.uniform(1, 2, (6, 2)).astype(np.float32)
    group_idx = np.array([0, 1, 1, 0, 1, 0, 0, 1]) if is_set else np.full(8, -1)
    parts = {
        "weight_packed": pack(numbers + 8, 4),
        "weight_scale": scales,
        "weight_g_idx": group_idx.astype(np.int32),
    }
    quantization = compressed("pack-quantized", num_bits=4, group_size=4, actorder="group")
    weight = open_tensors(tmp_path, of_module(parts), quantization).read(NAME)
    of_column = group_idx if is_set else np.arange(8) // 4
    np.testing.assert_array_equal(weight, np.float32(numbers) * scales[:, of_column])


def test_module_has_the_scheme_of_the_group_that_names_it(tmp_path):
    def group(targets, num_bits):
        return {"targets": targets, "weights": {"num_bits": num_bits, "strategy": "channel"}}

    quantization = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "config_groups": {
            "of_classes": group(["Linear"], 8) | {"format": "int-quantized"},
            "of_patterns": group([r"re:.*\.b\..*"], 4) | {"format": "pack-quantized"},
            "of_names": group(["m.b.up"], 8) | {"format": "pack-quantized"},
            "of_activations": {"targets": ["Attention"], "weights": None},
        },
    }
    eight, four = np.arange(-4, 4).reshape(1, 8), np.arange(-8, 0).reshape(1, 8)
    scale = {"weight_scale": np.full((1, 1), 2, np.float32)}
    tensors = {
        **of_module({"weight": eight.astype(np.int8)} | scale, "m.a.up"),
        **of_module({"weight_packed": pack(eight + 128, 8)} | scale, "m.b.up"),
        **of_module({"weight_packed": pack(four + 8, 4)} | scale, "m.b.down"),
    }
    checkpoint = open_tensors(tmp_path, tensors, quantization)
    for module, numbers in (("m.a.up", eight), ("m.b.up", eight), ("m.b.down", four)):
        np.testing.assert_array_equal(checkpoint.read(f"{module}.weight"), 2 * numbers)


def test_module_without_a_group_is_named(tmp_path):
    quantization = compressed("pack-quantized", num_bits=4, strategy="group", group_size=16)
    quantization["config_groups"]["group_0"]["targets"] = ["re:.*down_proj"]
    parts = as_packed(np.random.RandomState(0).standard_normal((8, 32))).parts
    with pytest.raises(UnsupportedModelError, match=f"no group .* has the module '{MODULE}'"):
        open_tensors(tmp_path, of_module(parts), quantization)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("weight_scale", None, "without .*up_proj.weight_scale"),
        ("weight_zero_point", None, "without .*up_proj.weight_zero_point"),
        ("weight_scale", np.ones((8, 1), np.float32), r"scale has shape \[8, 1\]; .* \[8, 2\]"),
        ("weight_scale", np.ones((8, 2), np.int8), "scale has dtype I8; .* needs F32"),
        ("weight_zero_point", np.ones((8, 2), np.int32), r"needs \[1, 2\]"),
        ("weight_zero_point", np.ones((1, 2), np.int8), "zero_point has dtype I8; .* needs I32"),
        ("weight_packed", np.ones((8, 4), np.int8), "packed has dtype I8; .* needs I32"),
        ("weight_g_idx", np.ones(4, np.int32), r"g_idx has shape \[4\]; .* needs \[32\]"),
    ],
)
def test_tensor_that_does_not_fit_is_named(tmp_path, part, array, message):
    parts = as_packed(np.random.RandomState(0).standard_normal((8, 32))).parts | {part: array}
    parts = {name: array for name, array in parts.items() if array is not None}
    with pytest.raises(WeightMismatchError, match=message):
        open_tensors(tmp_path, of_module(parts), PACKED)


@pytest.mark.parametrize(
    ("layout", "weights", "error", "message"),
    [
        ("nvfp4-pack-quantized", {}, UnsupportedModelError, "format is 'nvfp4-pack-quantized'"),
        (None, {}, UnsupportedModelError, "config_groups.group_0.format is None"),
        ("pack-quantized", {"num_bits": 3}, UnsupportedModelError, "num_bits is 3, .* 4, 8"),
        ("pack-quantized", {"type": "float"}, UnsupportedModelError, "weights.type is 'float'"),
        ("int-quantized", {"strategy": "token"}, UnsupportedModelError, "strategy is 'token'"),
        ("int-quantized", {"strategy": "group"}, ModelConfigError, "group_size is missing"),
        ("int-quantized", {"symmetric": "no"}, ModelConfigError, "symmetric is 'no'"),
        ("int-quantized", {"strategy": "block"}, ModelConfigError, "block_structure is None"),
        (
            "int-quantized",
            {"strategy": "block", "block_structure": [4, 4], "symmetric": False},
            UnsupportedModelError,
            "symmetric is false with the type 'int' and the strategy 'block'",
        ),
        (
            "float-quantized",
            {"type": "float", "symmetric": False},
            UnsupportedModelError,
            "symmetric is false with the type 'float'",
        ),
    ],
)
def test_other_schemes_are_refused(layout, weights, error, message):
    with pytest.raises(error, match=message):
        CompressedTensors.read(compressed(layout, **weights))


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, UnsupportedModelError, "24-bitmask"),
        ({"transform_config": {"config_groups": {"u": {}}}}, UnsupportedModelError, "transform"),
        ({"config_groups": {"a": 1}}, ModelConfigError, "config_groups.a is 1; expected an object"),
        ({"ignore": ["re:("]}, ModelConfigError, "ignore contains '\\(', which is not a regular"),
    ],
)
def test_other_settings_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        CompressedTensors.read(PACKED | fields)
