"""Quantized kernels on the device: answers are transformers' on the weights that they stand for."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import LoadedModel, load_model
from models.stored_kernels.scaled import ScaledKernel
from tests.end_to_end.parity import SURE_GAP, largest_difference, make_checkpoint
from tests.models.loading.parameters_apart import parameters_apart
from tests.models.loading.quantized.quantizers import MXFP4, as_mxfp4
from tests.models.loading.quantized.stored import save_tensors
from tests.models.stored_kernels.dequantized import dequantized
from tests.oracles.paged_stepper import MAX_MODEL_LEN, PagedStepper

if TYPE_CHECKING:
    import torch

PROMPT_LEN = 30
NUM_NEW_TOKENS = 12


def write_dequantized(model: LoadedModel, folder: Path) -> int:
    """Replaces the weights in the folder by the dequantized weights of the model's kernels.

    Returns:
        The number of kernels.
    """
    tensors = load_file(folder / "model.safetensors")
    values = parameters_apart(model)
    kernels = {name: k for name, k in values.items() if isinstance(k, ScaledKernel)}
    for name, kernel in kernels.items():
        sources = model.weight_rules[name].sources
        matrices_np = dequantized(kernel).reshape(-1, *kernel.shape[-2:])
        for source, matrix_np in zip(sources, matrices_np, strict=True):
            assert tensors[source.name].shape == matrix_np.T.shape
            tensors[source.name] = np.ascontiguousarray(matrix_np.T)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return len(kernels)


# The first layer of the model with experts has an MLP.
@pytest.mark.parametrize(
    ("quantization", "family"),
    [
        ("int4", "qwen3-moe"),
        ("int8", "llama"),
        # In the normal run, `test_scaled.py` checks the products of each format.
        pytest.param("fp8", "granite", marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_transformers_on_the_dequantized_weights(
    tmp_path: Path, quantization: str, family: str
) -> None:
    torch = pytest.importorskip("torch")
    hf_model = make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    arguments = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    loaded = load_model(tmp_path, quantization=quantization, **arguments)
    assert write_dequantized(loaded, tmp_path) >= 7 * len(loaded.config.attention_layers)
    check_tokens(loaded, type(hf_model).from_pretrained(tmp_path, dtype=torch.float32).eval())


def test_kept_experts_of_gpt_oss_have_the_tokens_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    plain, folder = tmp_path / "plain", tmp_path / "stored"
    hf_model = make_checkpoint("gpt-oss", plain, 1, is_shallow=True, is_sharp=True)
    weights = load_file(plain / "model.safetensors")
    stored = {}
    for name, weight in weights.items():
        if not name.endswith((".gate_up_proj", ".down_proj")):
            stored[name] = weight
            continue
        # [num_experts, in, out]
        quantized = [as_mxfp4(expert.T) for expert in weight]
        exact = np.stack([expert.weight.T for expert in quantized])
        weights[name] = np.ascontiguousarray(exact)
        for part in ("blocks", "scales"):
            stored[f"{name}_{part}"] = np.stack([q.parts[f"weight_{part}"] for q in quantized])
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    save_tensors(folder / "model.safetensors", stored)
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = MXFP4
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    loaded = load_model(folder, quantization="checkpoint", **arguments)
    kernels = [k for k in loaded.parameters.values() if isinstance(k, ScaledKernel)]
    assert len(kernels) == 3 * loaded.config.num_layers
    check_tokens(loaded, type(hf_model).from_pretrained(plain, dtype=torch.float32).eval())


def check_tokens(loaded: LoadedModel, hf_model: "torch.nn.Module") -> None:
    """Compares logits and greedy tokens of one request."""
    from tests.oracles import families

    (prompt,) = families.prompts(1, families.VOCAB, [PROMPT_LEN])
    wanted, gaps, logits = families.greedy(hf_model, prompt, NUM_NEW_TOKENS)
    bound = largest_difference(float(logits.abs().max()), 0.0)
    assert min(gaps) > SURE_GAP * bound
    stepper = PagedStepper(loaded)
    got, chunk = [], prompt
    for step_logits in logits.numpy():
        own = stepper.step({0: chunk})[0][-1]
        assert np.abs(own - step_logits).max() <= bound
        chunk = [int(own.argmax())]
        got += chunk
    assert got == wanted
