"""AWQ: words of eight outputs in AutoAWQ's order, scales and zero points of groups of inputs."""

import numpy as np
import pytest

from models.errors import ModelConfigError, UnsupportedModelError, WeightMismatchError
from models.loading.quantized.awq import Awq
from tests.models.loading.quantized.quantizers import AWQ, as_awq
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors

NAME = f"{MODULE}.weight"
# AutoAWQ 0.2.9, `WQLinear_GEMM.from_linear`, of a matrix with 2 inputs and 32 outputs in one group.
GOLDEN_SCALES = np.array([[0.5, 1, 2, 4] * 8], np.float16)
GOLDEN_QWEIGHT = [
    [-1442210422, 561014983, -1998328484, 1861207377],
    [1532203912, -85710122, -1155892607, 68190027],
]
GOLDEN_QZEROS = [[-2058776800, 1373966807, -1263059803, -1307631616]]
# Twice the weights of each input, so that they are integers.
GOLDEN_TWICE = [
    [10, 0, 24, -32, -2, 10, 4, 16, 0, -10, -4, -56, 7, 0, 20, -24]
    + [7, -8, -20, 24, 1, 8, 44, -24, 1, 0, 20, 112, 5, 24, 40, -40],
    [8, -12, 24, 8, -12, 12, 4, -24, -1, -2, 0, 0, 9, 18, 4, 80]
    + [-4, 6, -8, -80, -2, 14, 16, 0, 11, -30, 16, 8, 15, 4, 20, -88],
]


def test_golden_tensors_of_autoawq(tmp_path):
    parts = {
        "qweight": np.array(GOLDEN_QWEIGHT, np.int32),
        "qzeros": np.array(GOLDEN_QZEROS, np.int32),
        "scales": GOLDEN_SCALES,
    }
    checkpoint = open_tensors(tmp_path, of_module(parts), AWQ | {"group_size": -1})
    assert {name: weight.shape for name, weight in checkpoint.weights.items()} == {NAME: (32, 2)}
    np.testing.assert_array_equal(2 * checkpoint.read(NAME), np.transpose(GOLDEN_TWICE))


def test_fields_have_two_names(tmp_path):
    quantized = as_awq(np.random.RandomState(0).standard_normal((16, 48)))
    names = {"quant_method": "awq", "w_bit": 4, "q_group_size": 16, "version": "GEMM"}
    checkpoint = open_tensors(tmp_path, of_module(quantized.parts), names)
    np.testing.assert_array_equal(checkpoint.read(NAME), quantized.weight)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("scales", None, r"up_proj\.qweight is stored without .*up_proj\.scales"),
        ("qzeros", None, r"stored without .*up_proj\.qzeros"),
        ("qzeros", np.zeros((2, 2), np.int32), r"qzeros has shape \[2, 2\]; .* needs \[3, 2\]"),
        ("scales", np.zeros((3, 8), np.float16), r"scales has shape \[3, 8\]; .* needs \[3, 16\]"),
        ("scales", np.zeros((3, 16), np.int32), "scales has dtype I32; .* needs F32 or F16"),
        ("qweight", np.zeros((48, 2), np.int8), "qweight has dtype I8; .* needs I32"),
        ("qweight", np.zeros(48, np.int32), r"qweight has shape \[48\]; .* needs 2 axes"),
    ],
)
def test_tensor_that_does_not_fit_is_named(tmp_path, part, array, message):
    parts = as_awq(np.random.RandomState(0).standard_normal((16, 48))).parts
    parts = {name: a for name, a in (parts | {part: array}).items() if a is not None}
    with pytest.raises(WeightMismatchError, match=message):
        open_tensors(tmp_path, of_module(parts), AWQ)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"bits": 8}, UnsupportedModelError, "quantization_config.bits is 8; AWQ has 4 bits"),
        ({"version": "gemv"}, UnsupportedModelError, "version is 'gemv', .* supports 'gemm'"),
        ({"zero_point": False}, UnsupportedModelError, "zero_point is False"),
        ({"group_size": 0}, ModelConfigError, "quantization_config.group_size is 0"),
    ],
)
def test_other_settings_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Awq.read(AWQ | fields)
