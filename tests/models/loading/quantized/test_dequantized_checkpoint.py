"""What a quantized checkpoint looks like to the loader."""

import logging

import numpy as np
import pytest

from models.errors import WeightMismatchError
from models.loading.quantized.dequantized_checkpoint import DequantizedCheckpoint
from models.loading.quantized.find_format import find_weight_format
from models.loading.safetensors_reader import SafetensorsCheckpoint
from tests.models.loading.quantized.quantizers import AWQ, FP8, GPTQ, PACKED, QUANTIZERS, as_awq
from tests.models.loading.quantized.stored import MODULE, of_module, open_tensors, save_tensors

WEIGHT = np.random.RandomState(0).standard_normal((16, 64)).astype(np.float32)
NAME = f"{MODULE}.weight"


@pytest.mark.parametrize("quant_method", QUANTIZERS)
def test_modules_that_are_not_quantized_stay_as_they_are(tmp_path, quant_method):
    quantization, quantize = QUANTIZERS[quant_method]
    plain = {
        "lm_head.weight": WEIGHT.astype(np.float16),
        "model.norm.weight": WEIGHT[0],
        f"{MODULE}.bias": WEIGHT[:, 0],
        "model.position_ids": np.arange(3),
    }
    tensors = plain | of_module(quantize(WEIGHT).parts)
    checkpoint = open_tensors(tmp_path, tensors, quantization)
    assert checkpoint.weights.keys() == {*plain, NAME}
    for name, array in plain.items():
        assert checkpoint.read(name).dtype == array.dtype
        np.testing.assert_array_equal(checkpoint.read(name), array)


@pytest.mark.parametrize("quant_method", QUANTIZERS)
def test_experts_with_tensors_of_their_own(tmp_path, quant_method):
    quantization, quantize = QUANTIZERS[quant_method]
    experts = {
        f"model.layers.0.mlp.experts.{idx}.down_proj": quantize((idx + 1) * WEIGHT)
        for idx in range(3)
    }
    tensors = {}
    for module, quantized in experts.items():
        tensors |= of_module(quantized.parts, module)
    checkpoint = open_tensors(tmp_path, tensors, quantization)
    for module, quantized in experts.items():
        np.testing.assert_array_equal(checkpoint.read(f"{module}.weight"), quantized.weight)


@pytest.mark.parametrize(
    ("dtype", "described"), [("float32", "F32"), ("bfloat16", "BF16"), ("float16", "F16")]
)
def test_dequantized_weight_has_the_dtype_of_its_description(tmp_path, dtype, described):
    quantized = as_awq(WEIGHT)
    checkpoint = open_tensors(tmp_path, of_module(quantized.parts), AWQ, dtype=dtype)
    assert checkpoint.weights[NAME].dtype == described
    np.testing.assert_array_equal(checkpoint.read(NAME), quantized.weight.astype(dtype))


def test_renamed_weights_are_still_dequantized(tmp_path):
    quantized = as_awq(WEIGHT)
    tensors = of_module(quantized.parts) | {"model.norm.weight": WEIGHT[0]}
    checkpoint = open_tensors(tmp_path, tensors, AWQ)
    checkpoint.rename({NAME: "model.norm.weight", "model.norm.weight": "other"})
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight"), quantized.weight)
    np.testing.assert_array_equal(checkpoint.read("other"), WEIGHT[0])


@pytest.mark.parametrize(
    ("quant_method", "field", "entry"),
    [
        ("fp8", "modules_to_not_convert", "up_proj"),
        ("fp8", "modules_to_not_convert", "model.layers.0"),
        ("fp8", "ignored_layers", "model.layers.*.mlp"),
        ("mxfp4", "modules_to_not_convert", "model.layers.0.mlp"),
        ("awq", "modules_to_not_convert", MODULE),
        ("gptq", "modules_to_not_convert", "up_proj"),
        ("compressed-tensors", "ignore", MODULE),
        ("compressed-tensors", "ignore", "re:.*up_proj$"),
    ],
)
def test_quantized_tensor_of_a_module_that_is_not_quantized_is_refused(
    tmp_path, quant_method, field, entry
):
    quantization, quantize = QUANTIZERS[quant_method]
    tensors = of_module(quantize(WEIGHT).parts)
    with pytest.raises(WeightMismatchError, match=f"lists {MODULE} .* not quantized, and tensor"):
        open_tensors(tmp_path, tensors, quantization | {field: [entry]})


@pytest.mark.parametrize(
    ("quantization", "entry"),
    [
        (FP8, "model.layers.0.mlp.up"),
        (FP8, "layers.0.mlp.up_proj_"),
        (GPTQ, "model.layer"),
        (AWQ, "mlp"),
        (PACKED, "up_proj"),
        (PACKED, "re:up_proj"),
    ],
)
def test_entry_matches_whole_names(tmp_path, quantization, entry):
    _, quantize = QUANTIZERS[quantization["quant_method"]]
    quantized = quantize(WEIGHT)
    lists = {"modules_to_not_convert": [entry], "ignore": [entry]}
    checkpoint = open_tensors(tmp_path, of_module(quantized.parts), quantization | lists)
    np.testing.assert_array_equal(checkpoint.read(NAME), quantized.weight)


def test_scales_of_activations_and_of_the_cache_are_left_out_with_one_warning(tmp_path, caplog):
    scale = np.ones(1, np.float32)
    names = [
        f"{MODULE}.input_scale",
        f"{MODULE}.activation_scale",
        "model.layers.0.self_attn.k_scale",
        "model.layers.0.self_attn.attn.v_scale",
        "model.layers.0.self_attn.k_proj.output_scale",
        "model.layers.0.self_attn.kv_cache_scale",
        "model.layers.0.mlp.experts.down_proj_activation_scale",
        f"{MODULE}.input_zero_point",
    ]
    _, quantize = QUANTIZERS["fp8"]
    tensors = of_module(quantize(WEIGHT).parts) | dict.fromkeys(names, scale)
    with caplog.at_level(logging.WARNING):
        checkpoint = open_tensors(tmp_path, tensors, FP8)
    assert [*checkpoint.weights] == [NAME]
    (record,) = caplog.records
    message = record.getMessage()
    assert "ignores 8 of its tensors: activation_scale, input_scale, input_zero_point" in message


def test_without_such_scales_nothing_is_logged(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        open_tensors(tmp_path, of_module(as_awq(WEIGHT).parts), AWQ)
    assert not caplog.records


def test_scale_without_numbers_is_left_to_the_check_of_names(tmp_path):
    scale = {f"{MODULE}.weight_scale_inv": np.ones((1, 1), np.float32)}
    assert open_tensors(tmp_path, scale, FP8).weights.keys() == scale.keys()


def test_tensors_of_one_weight_may_be_in_several_files(tmp_path):
    quantized = as_awq(WEIGHT)
    for number, (name, array) in enumerate(of_module(quantized.parts).items(), start=1):
        save_tensors(tmp_path / f"model-0000{number}-of-00003.safetensors", {name: array})
    weight_format = find_weight_format({"quantization_config": AWQ})
    files = SafetensorsCheckpoint(tmp_path)
    checkpoint = DequantizedCheckpoint(files, weight_format, dtype="float32")
    np.testing.assert_array_equal(checkpoint.read(NAME), quantized.weight)
