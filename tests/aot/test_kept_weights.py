"""Steps with quantized weights, compiled for an H200: what is widened is one matrix at a time."""

import functools
import json

import pytest

from models import load_model
from models.platforms import GPU
from tests.aot.step_programs import MAX_MODEL_LEN, NUM_LAYERS, burst

HIDDEN, INTERMEDIATE, NUM_EXPERTS, VOCAB = 256, 512, 64, 4_096
# Quantization -> bytes of a weight.
KINDS = {"fp8": 1, "int4": 0.5}
each = pytest.mark.parametrize("quantization", KINDS)


@pytest.fixture(scope="module")
def compiled(h200, compile_for_h200, tmp_path_factory):
    """Makes a decode step's `StepProgram` and its `CompiledProgram`, once for all tests."""

    @functools.cache
    def compile_step(quantization):
        folder = tmp_path_factory.mktemp("model")
        config = {
            "architectures": ["GptOssForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": MAX_MODEL_LEN,
            "num_local_experts": NUM_EXPERTS,
            "num_experts_per_tok": 4,
            "tie_word_embeddings": False,
        }
        (folder / "config.json").write_text(json.dumps(config))
        model = load_model(
            folder,
            dtype="bfloat16",
            load_format="dummy",
            quantization=quantization,
            platform=GPU(),
        )
        program = burst(model, h200.mesh, max_steps=1)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=h200.mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each
def test_no_stack_of_experts_is_widened(compiled, quantization):
    program, result = compiled(quantization)
    num_weights = NUM_EXPERTS * HIDDEN * INTERMEDIATE
    assert result.cache_copies(min_bytes=int(num_weights * KINDS[quantization])) == []
    assert result.aliased_bytes >= program.cache_bytes
    # In bfloat16.
    assert result.temp_bytes < 2 * num_weights


@each
def test_weights_take_their_stored_bytes(compiled, quantization):
    program, _ = compiled(quantization)
    num_weights = NUM_LAYERS * 3 * NUM_EXPERTS * HIDDEN * INTERMEDIATE
    # Numbers and scales of stacks in panels; a matrix has at most four axes.
    of_stacks = sum(
        param.size * param.dtype.itemsize for param in program.args[0] if param.ndim == 5
    )
    assert of_stacks == num_weights * KINDS[quantization]
