"""GPTQ: words of neighboring inputs, zero points less one, and groups in activation order."""

import numpy as np
import pytest

from models.errors import CheckpointError, UnsupportedModelError, WeightMismatchError
from models.loading.quantized.gptq import Gptq
from tests.models.loading.quantized.quantizers import GPTQ, as_gptq, with_groups
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors, pack

NAME = f"{MODULE}.weight"
# AutoGPTQ 0.7.1, `QuantLinear.pack`, of a matrix with 32 inputs and outputs in two groups. These
# are the words and weights of outputs 0, 1 and 31.
GOLDEN_OUTPUTS = (0, 1, 31)
GOLDEN_G_IDX = np.array([0, 0, 1, 1, 1, 0, 1, 0] * 4, np.int32)
GOLDEN_SCALES = np.array([[0.5, 2] * 16, [1, 4] * 16], np.float32)
GOLDEN_QWEIGHT = [
    [507736818, 186219462, -1956967220, -1807947644],
    [-1619764182, 2095909146, -1966559924, 1346497764],
    [-258235196, 1628784484, 1228936789, -879699543],
]
GOLDEN_QZEROS = [
    [-287521163, 2139171990, 301644742, 1356031810],
    [-1907241693, 2050217448, 826852690, -796117510],
]
# Twice the weights of each output, so that they are integers.
GOLDEN_TWICE = [
    [-4, 9, -4, 6, -2, -2, 20, -5, 0, 6, 14, 6, 10, -5, 14, -6]
    + [6, 6, 16, -8, 14, -1, 14, 2, -2, 2, 8, 20, 16, -3, 0, 3],
    [8, -24, 72, 16, 8, -4, 96, 4, 8, -28, 48, -24, 80, 24, 72, -4]
    + [16, -16, 80, 56, 40, 16, 56, 0, -16, 24, 72, 88, -16, -16, -24, -12],
    [-8, 24, -80, -32, -24, 12, -112, 36, -8, 0, -56, -80, -72, -20, -104, 0]
    + [-4, -4, -64, -104, -112, -8, -40, -8, 12, 16, -40, -8, -112, 12, -24, 24],
]


def test_golden_tensors_of_autogptq(tmp_path):
    qweight = np.zeros((4, 32), np.int32)
    qweight[:, GOLDEN_OUTPUTS] = np.transpose(GOLDEN_QWEIGHT)
    parts = {
        "qweight": qweight,
        "qzeros": np.array(GOLDEN_QZEROS, np.int32),
        "scales": GOLDEN_SCALES,
        "g_idx": GOLDEN_G_IDX,
    }
    checkpoint = open_tensors(tmp_path, of_module(parts), GPTQ)
    weight = checkpoint.read(NAME)
    assert weight.shape == checkpoint.weights[NAME].shape == (32, 32)
    np.testing.assert_array_equal(2 * weight[[*GOLDEN_OUTPUTS]], GOLDEN_TWICE)


@pytest.mark.parametrize("num_bits", [2, 4, 8])
@pytest.mark.parametrize("group_size", [16, -1])
@pytest.mark.parametrize("added", [1, 0])
@pytest.mark.parametrize("has_g_idx", [False, True])
def test_groups_of_neighbors(tmp_path, num_bits, group_size, added, has_g_idx):
    group_idx = np.arange(48, dtype=np.int32) // (group_size if group_size > 0 else 48)
    weight = np.random.RandomState(0).standard_normal((16, 48))
    numbers, scales, zeros, exact = with_groups(weight, group_idx, num_bits)
    parts = {
        "qweight": np.ascontiguousarray(pack(numbers, num_bits).T),
        "qzeros": pack(zeros.T - added, num_bits),
        "scales": np.ascontiguousarray(scales.T),
    } | ({"g_idx": group_idx} if has_g_idx else {})
    layout = {"checkpoint_format": "gptq" if added else "gptq_v2"}
    quantization = GPTQ | {"bits": num_bits, "group_size": group_size} | layout
    checkpoint = open_tensors(tmp_path, of_module(parts), quantization)
    np.testing.assert_array_equal(checkpoint.read(NAME), exact)


@pytest.mark.parametrize("outside", [3, -1])
def test_group_that_does_not_exist_is_named(tmp_path, outside):
    parts = as_gptq(np.random.RandomState(0).standard_normal((16, 48))).parts
    parts["g_idx"][5] = outside
    checkpoint = open_tensors(tmp_path, of_module(parts), GPTQ)
    with pytest.raises(CheckpointError, match=r"up_proj\.weight .* groups .* expected 0 to 2"):
        checkpoint.read(NAME)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("scales", None, r"is stored without .*up_proj\.scales"),
        ("qzeros", np.zeros((3, 1), np.int32), r"qzeros has shape \[3, 1\]; .* needs \[3, 2\]"),
        ("scales", np.zeros((6, 16), np.float16), r"scales has shape \[6, 16\]; .* \[3, 16\]"),
        ("g_idx", np.zeros(6, np.int32), r"g_idx has shape \[6\]; .* needs \[48\]"),
        ("g_idx", np.zeros(48, np.float32), "g_idx has dtype F32"),
    ],
)
def test_tensor_that_does_not_fit_is_named(tmp_path, part, array, message):
    parts = as_gptq(np.random.RandomState(0).standard_normal((16, 48))).parts | {part: array}
    parts = {name: array for name, array in parts.items() if array is not None}
    with pytest.raises(WeightMismatchError, match=message):
        open_tensors(tmp_path, of_module(parts), GPTQ)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bits": 3}, "quantization_config.bits is 3, .* supports 2, 4, 8"),
        ({"bits": None}, "quantization_config.bits is None"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        ({"dynamic": {"+:.*down.*": {"bits": 8}}}, r"dynamic has other settings for '\+:"),
    ],
)
def test_other_settings_are_refused(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Gptq.read(GPTQ | fields)


def test_modules_that_dynamic_excludes_stay_plain(tmp_path):
    plain = np.random.RandomState(0).standard_normal((4, 4)).astype(np.float32)
    quantization = GPTQ | {"dynamic": {"-:.*up_proj": {}}}
    checkpoint = open_tensors(tmp_path, {NAME: plain}, quantization)
    np.testing.assert_array_equal(checkpoint.read(NAME), plain)
