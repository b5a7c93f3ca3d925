"""MXFP4: two E2M1 numbers in an octet, and a power of two for 32 of them."""

import numpy as np
import pytest

from models.errors import ModelConfigError, WeightMismatchError
from models.loading.quantized.mxfp4 import Mxfp4
from tests.models.loading.quantized.quantizers import E2M1, MXFP4, as_mxfp4
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors

STACK = "model.layers.0.mlp.experts.gate_up_proj"


def test_all_codes_and_the_order_of_their_halves(tmp_path):
    # 0x10, 0x32 and so on hold the codes 0 to 15; the second half of the block holds them again.
    octets = np.array([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2, np.uint8)
    blocks = np.broadcast_to(octets, (3, 1, 16))
    parts = {"weight_blocks": blocks, "weight_scales": np.array([[127], [126], [130]], np.uint8)}
    weight = open_tensors(tmp_path, of_module(parts), MXFP4).read(f"{MODULE}.weight")
    positive = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = np.array([*positive, *(-number for number in positive)] * 2)
    np.testing.assert_array_equal(weight, [numbers, numbers / 2, numbers * 8])


def test_experts_equal_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.RandomState(0)
    blocks = rng.randint(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = rng.randint(115, 135, (3, 10, 2)).astype(np.uint8)
    tensors = {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales}
    checkpoint = open_tensors(tmp_path, tensors, MXFP4)
    wanted = mxfp4.convert_moe_packed_tensors(
        torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
    )
    assert {name: w.shape for name, w in checkpoint.weights.items()} == {STACK: (3, 64, 10)}
    np.testing.assert_array_equal(checkpoint.read(STACK), wanted.numpy())


def test_numbers_are_exact_in_bfloat16(tmp_path):
    quantized = as_mxfp4(np.random.RandomState(0).standard_normal((8, 64)))
    checkpoint = open_tensors(tmp_path, of_module(quantized.parts), MXFP4, dtype="bfloat16")
    weight = checkpoint.read(f"{MODULE}.weight")
    assert weight.dtype.name == "bfloat16" and E2M1.max() == 6
    np.testing.assert_array_equal(weight.astype(np.float32), quantized.weight)


@pytest.mark.parametrize(
    ("part", "array", "message"),
    [
        ("weight_scales", None, "weight_blocks is stored without .*weight_scales"),
        ("weight_scales", np.zeros((8, 1), np.uint8), r"scales has shape \[8, 1\]; .* \[8, 2\]"),
        ("weight_scales", np.zeros((8, 2), np.float32), "scales has dtype F32; .* needs U8"),
        ("weight_blocks", np.zeros((8, 2, 8), np.uint8), r"shape \[8, 2, 8\]; .* \[8, 2, 16\]"),
        ("weight_blocks", np.zeros((8, 32), np.uint8), r"shape \[8, 32\]; .* needs 3 or 4 axes"),
    ],
)
def test_tensor_that_does_not_fit_is_named(tmp_path, part, array, message):
    parts = as_mxfp4(np.random.RandomState(0).standard_normal((8, 64))).parts | {part: array}
    parts = {name: array for name, array in parts.items() if array is not None}
    with pytest.raises(WeightMismatchError, match=message):
        open_tensors(tmp_path, of_module(parts), MXFP4)


def test_list_of_modules_must_be_a_list():
    with pytest.raises(ModelConfigError, match="modules_to_not_convert is 'lm_head'"):
        Mxfp4.read(MXFP4 | {"modules_to_not_convert": "lm_head"})
