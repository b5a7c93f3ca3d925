"""Quantized kernels on the device: answers are transformers' on the weights that they stand for."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import LoadedModel, load_model
from models.stored_kernels.scaled import ScaledKernel
from tests.end_to_end.parity import SURE_GAP, largest_difference, make_checkpoint
from tests.models.stored_kernels.dequantized import dequantized
from tests.oracles.paged_stepper import MAX_MODEL_LEN, PagedStepper

PROMPT_LEN = 30
NUM_NEW_TOKENS = 12


def write_dequantized(model: LoadedModel, folder: Path) -> int:
    """Replaces the weights in the folder by the dequantized weights of the model's kernels.

    Returns:
        The number of kernels.
    """
    tensors = load_file(folder / "model.safetensors")
    kernels = {n: k for n, k in model.parameters.items() if isinstance(k, ScaledKernel)}
    for name, kernel in kernels.items():
        sources = model.weight_rules[name].sources
        matrices_np = dequantized(kernel).reshape(-1, *kernel.shape[-2:])
        for source, matrix_np in zip(sources, matrices_np, strict=True):
            assert tensors[source.name].shape == matrix_np.T.shape
            tensors[source.name] = np.ascontiguousarray(matrix_np.T)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return len(kernels)


# The first layer of the model with experts has an MLP.
@pytest.mark.parametrize(("quantization", "family"), [("int4", "qwen3-moe"), ("int8", "llama")])
def test_tokens_are_those_of_transformers_on_the_dequantized_weights(
    tmp_path: Path, quantization: str, family: str
) -> None:
    torch = pytest.importorskip("torch")
    from tests.oracles import families

    hf_model = make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    arguments = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN}
    loaded = load_model(tmp_path, quantization=quantization, **arguments)
    assert write_dequantized(loaded, tmp_path) >= 7 * len(loaded.config.attention_layers)
    hf_model = type(hf_model).from_pretrained(tmp_path, dtype=torch.float32).eval()
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
