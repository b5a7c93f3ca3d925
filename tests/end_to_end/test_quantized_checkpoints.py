"""Quantized checkpoints load with exactly the weights that their numbers and scales stand for."""

import json
import logging
import math
import re

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import (
    CheckpointError,
    ModelError,
    UnsupportedModelError,
    WeightMismatchError,
)
from models.loading.load_model import load_model
from models.loading.safetensors_reader import SafetensorsCheckpoint
from models.stored_kernels.scaled import ScaledKernel
from tests.models.loading.parameters_apart import parameters_apart
from tests.models.loading.quantized.quantizers import MXFP4, QUANTIZERS, as_mxfp4
from tests.models.loading.quantized.stored import save_tensors
from tests.models.stored_kernels.dequantized import dequantized
from tests.oracles.dense_model import dense_logits
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import PagedStepper

FORMATS = [*QUANTIZERS]


def write_pair(tmp_path, quant_method, **arguments):
    """A quantized checkpoint, and a plain one with the weights that it stands for."""
    quantization, quantize = QUANTIZERS[quant_method]
    arguments = {"num_layers": 1} | arguments
    plain = write_random_checkpoint(tmp_path / "plain", **arguments)
    extra = {"quantization_config": quantization} | arguments.get("extra_config", {})
    folder = write_random_checkpoint(tmp_path / "stored", **arguments | {"extra_config": extra})
    stored, weights = {}, load_file(plain / "model.safetensors")
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if not module.endswith("_proj"):
            stored[name] = weight
            continue
        quantized = quantize(weight)
        stored |= {f"{module}.{part}": array for part, array in quantized.parts.items()}
        weights[name] = quantized.weight
        # Wrong scales or a wrong order of numbers are far from the weight that was quantized.
        assert np.abs(quantized.weight - weight).max() < 0.25 * np.abs(weight).max()
    save_file(weights, plain / "model.safetensors")
    save_tensors(folder / "model.safetensors", stored)
    return folder, plain


def read_tensors(folder):
    """All tensors of the folder's one file."""
    checkpoint = SafetensorsCheckpoint(folder)
    return {name: checkpoint.read(name) for name in checkpoint.weights}


@pytest.mark.parametrize("quant_method", FORMATS)
def test_every_parameter_is_that_of_the_dequantized_checkpoint(tmp_path, quant_method):
    folder, plain = write_pair(tmp_path, quant_method)
    got, wanted = load_model(folder), load_model(plain)
    assert got.param_names == wanted.param_names
    assert len(got.params) == 12  # an embedding, a head, seven matrices and three norms
    for name, one, other in zip(got.param_names, got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)


@pytest.mark.parametrize("quant_method", FORMATS)
def test_numbers_are_kept_as_they_are_or_refused(tmp_path, quant_method):
    folder, plain = write_pair(tmp_path, quant_method)
    if quant_method == "gptq":
        reason = "weight cannot stay quantized: neighbor.* activation order"
        with pytest.raises(UnsupportedModelError, match=reason):
            load_model(folder, quantization="checkpoint")
        return
    got, wanted = (
        load_model(path, dtype="float32", quantization=quantization)
        for path, quantization in ((folder, "checkpoint"), (plain, "none"))
    )
    kernels = [k for k in got.parameters.values() if isinstance(k, ScaledKernel)]
    assert len(kernels) == 7
    wanted_format = {"fp8": "e4m3", "mxfp4": "e2m1"}.get(quant_method, "int4")
    assert {kernel.number_format for kernel in kernels} == {wanted_format}
    for kernel in kernels:
        num_numbers = math.prod(kernel.shape)
        assert kernel.numbers.nbytes == num_numbers // (1 if quant_method == "fp8" else 2)
    if quant_method == "mxfp4":
        assert {kernel.scales.dtype.name for kernel in kernels} == {"uint8"}
    for name, value in wanted.parameters.items():
        own = got.parameters[name]
        own = dequantized(own) if isinstance(own, ScaledKernel) else own
        np.testing.assert_array_equal(own, value, err_msg=name)


@pytest.mark.parametrize(
    "quant_method", ["mxfp4", *(pytest.param(m, marks=pytest.mark.slow) for m in ("fp8", "awq"))]
)
def test_memory_is_asked_for_parts_that_are_loaded(tmp_path, caplog, quant_method):
    arguments = {"hidden_size": 384, "intermediate_size": 768, "vocab_size": 64}
    folder, _ = write_pair(tmp_path, quant_method, **arguments)
    tensors = read_tensors(folder)
    # Larger than the rest.
    extra = {"vision_tower.patch.weight": np.ones((2048, 2048), np.float32)}
    save_tensors(folder / "model.safetensors", tensors | extra)
    config = json.loads((folder / "config.json").read_text())
    text = {"text_config": config, "architectures": ["LlavaForConditionalGeneration"]}
    quantization = config.pop("quantization_config")
    text |= {"model_type": "llava", "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(text))
    with caplog.at_level(logging.INFO, "models.loading.weight_memory"):
        loaded = load_model(folder, dtype="float32", quantization="checkpoint")
    asked = 2**20 * float(re.search(r"about (.*) MiB on the device", caplog.text)[1])
    # In memory, a block's scale is repeated for each output, and other scales are float32.
    assert 0.8 * loaded.device_bytes < asked <= loaded.device_bytes + 2**16
    assert asked < loaded.file_bytes / 4


def test_numbers_are_kept_of_quantized_checkpoints_alone(tmp_path):
    folder = write_random_checkpoint(tmp_path, num_layers=1)
    with pytest.raises(ModelError, match="quantization is 'checkpoint', which .* has no quantized"):
        load_model(folder, quantization="checkpoint")


def test_logits_equal_the_dequantized_checkpoint(tmp_path):
    folder, plain = write_pair(tmp_path, "compressed-tensors")
    tokens = {0: [5, 6, 7, 8], 1: [9]}
    logits = PagedStepper(load_model(folder)).step(tokens)
    for row, row_tokens in tokens.items():
        exact = dense_logits(plain, row_tokens)
        np.testing.assert_allclose(logits[row], exact, atol=1e-5 * np.abs(exact).max())


@pytest.mark.parametrize("quant_method", ["fp8", "awq"])
def test_weights_are_rounded_once_to_the_dtype_of_the_model(tmp_path, quant_method):
    folder, plain = write_pair(tmp_path, quant_method)
    loaded = load_model(folder, dtype="bfloat16")
    assert {param.dtype for param in loaded.params} == {jnp.dtype("bfloat16")}
    kernel = loaded.params[loaded.param_names.index("layers.0.mlp.up_proj.kernel")]
    weight = load_file(plain / "model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    np.testing.assert_array_equal(np.asarray(kernel), weight.T.astype(ml_dtypes.bfloat16))


def test_stack_of_experts_is_read_in_the_order_of_plain_checkpoints(tmp_path):
    config = {
        **{"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 64},
        **{"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = load_model(tmp_path, load_format="dummy")
    rng = np.random.RandomState(0)
    shapes = {s.name: s.shape for rule in plain.weight_rules.values() for s in rule.sources}
    stored = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    exact = {}
    for local in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{local}"
        # [num_experts, in, out]
        quantized = [as_mxfp4(expert.T) for expert in stored.pop(name)]
        for part in ("blocks", "scales"):
            arrays = [expert.parts[f"weight_{part}"] for expert in quantized]
            stored[f"{name}_{part}"] = np.stack(arrays)
        exact[local] = np.stack([expert.weight.T for expert in quantized])
    save_tensors(tmp_path / "model.safetensors", stored)
    lists = {"modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}
    config["quantization_config"] = MXFP4 | lists
    (tmp_path / "config.json").write_text(json.dumps(config))
    loaded = load_model(tmp_path)
    assert loaded.param_names == plain.param_names
    params = parameters_apart(loaded)
    experts = "layers.0.mlp.experts"
    np.testing.assert_array_equal(
        params[f"{experts}.gate_proj.kernel"], exact["gate_up_proj"][:, :, 0::2]
    )
    np.testing.assert_array_equal(
        params[f"{experts}.up_proj.kernel"], exact["gate_up_proj"][:, :, 1::2]
    )
    np.testing.assert_array_equal(params[f"{experts}.down_proj.kernel"], exact["down_proj"])
    kept = load_model(tmp_path, quantization="checkpoint").parameters
    for name, param in params.items():
        value = kept[name]
        if name.startswith(experts) and name.endswith(".kernel"):
            assert value.number_format == "e2m1"
            value = dequantized(value)
        np.testing.assert_array_equal(value, param, err_msg=name)


@pytest.mark.parametrize("quantization", ["none", "checkpoint"])
@pytest.mark.parametrize(
    ("quant_method", "ending", "bits"), [("mxfp4", "_scales", 255), ("fp8", "", 127)]
)
def test_number_that_is_not_finite_is_named(tmp_path, quant_method, ending, bits, quantization):
    folder, _ = write_pair(tmp_path, quant_method)
    name = f"model.layers.0.mlp.up_proj.weight{ending}"
    tensors = read_tensors(folder)
    tensors[name] = np.full(tensors[name].shape, bits, np.uint8).view(tensors[name].dtype)
    save_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(CheckpointError, match=r"weight '?model\.layers\.0\.mlp\.up_proj\.weight"):
        load_model(folder, quantization=quantization)


def test_unknown_method_is_refused_without_weights(tmp_path):
    folder = write_random_checkpoint(
        tmp_path, extra_config={"quantization_config": {"quant_method": "bitsandbytes"}}
    )
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match="quant_method is 'bitsandbytes'"):
        load_model(folder)


def test_dummy_weights_need_no_quantized_tensors(tmp_path):
    folder, plain = write_pair(tmp_path, "awq")
    (folder / "model.safetensors").unlink()
    got, wanted = (load_model(path, load_format="dummy") for path in (folder, plain))
    for one, other in zip(got.params, wanted.params, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("quant_method", FORMATS)
def test_quantized_weights_without_a_description_are_refused(tmp_path, quant_method):
    folder, _ = write_pair(tmp_path, quant_method)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightMismatchError, match="quantization_config in config.json does not"):
        load_model(folder)


@pytest.mark.parametrize("quant_method", FORMATS)
def test_dtype_of_the_model_is_that_of_the_weights_that_are_not_quantized(tmp_path, quant_method):
    folder, _ = write_pair(tmp_path, quant_method, extra_config={"torch_dtype": None})
    stored = read_tensors(folder)
    halved = {
        name: weight.astype(np.float16)
        for name, weight in stored.items()
        if weight.dtype == np.float32 and "scale" not in name
    }
    save_tensors(folder / "model.safetensors", stored | halved)
    assert load_model(folder).config.dtype == "float16"
