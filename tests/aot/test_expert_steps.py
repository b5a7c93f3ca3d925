"""Steps with experts, compiled for H200s: one kernel per product, and no copies of weights."""

import collections
import functools
import json
import math

import pytest

from models import load_model
from models.platforms import GPU
from tests.aot.step_programs import MAX_MODEL_LEN, NUM_LAYERS, burst, each_step, mixed_step

HIDDEN, INTERMEDIATE = 256, 512
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "mixed": functools.partial(mixed_step, num_tokens=256),
}
# (kind of step, number of experts, number of devices)
ALL = [("decode", 8, 1), ("decode", 64, 1), ("mixed", 8, 1), ("mixed", 64, 1), ("decode", 64, 4)]
each = each_step(ALL)


@pytest.fixture(scope="module")
def compiled(h200, four_h200s, compile_for_h200, tmp_path_factory):
    """Makes a step's `StepProgram` and its `CompiledProgram`, once for all tests."""

    @functools.cache
    def compile_step(step):
        kind, num_experts, num_devices = step
        folder = tmp_path_factory.mktemp("model")
        config = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "vocab_size": 4_096,
            "hidden_size": HIDDEN,
            "intermediate_size": INTERMEDIATE,
            "num_hidden_layers": NUM_LAYERS,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "max_position_embeddings": MAX_MODEL_LEN,
            "num_experts": num_experts,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": INTERMEDIATE,
        }
        (folder / "config.json").write_text(json.dumps(config))
        model = load_model(folder, dtype="bfloat16", load_format="dummy", platform=GPU())
        mesh = {1: h200, 4: four_h200s}[num_devices].mesh
        program = KINDS[kind](model, mesh)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each
def test_each_product_with_experts_is_one_kernel(compiled, step):
    calls = collections.Counter(compiled(step)[1].kernel_names)
    assert calls["grouped_matmul"] == 3 * NUM_LAYERS


@each
def test_kernels_do_not_spill_and_are_in_command_buffers(compiled, step):
    result = compiled(step)[1]
    assert {kernel.name for kernel in result.ptxas if kernel.spill_bytes} == set()
    assert result.in_command_buffer == result.kernel_names


@each
def test_weights_of_experts_are_not_copied(compiled, step):
    program, result = compiled(step)
    expert_bytes = HIDDEN * INTERMEDIATE * 2 * step[1] // step[2]
    # With 8 experts, arrays of tokens may be as large as the weights.
    if step[1] == 64:
        assert result.cache_copies(min_bytes=expert_bytes) == []
    assert [c for c in result.collectives if c.num_bytes >= expert_bytes // 8] == []
    assert result.aliased_bytes >= program.cache_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_temporary_memory_is_that_of_tokens(compiled, kind):
    few, many = (compiled((kind, num_experts, 1)) for num_experts in (8, 64))
    # Each further expert adds at most one tile of 8 rows. A row has an input, gate, up, their
    # product and an output.
    row_bytes = 2 * (2 * HIDDEN + 3 * INTERMEDIATE)
    assert many[1].temp_bytes - few[1].temp_bytes <= (64 - 8) * 8 * row_bytes


@each
def test_devices_share_every_expert(compiled, step):
    program = compiled(step)[0]
    experts = [param for param in program.args[0] if len(param.shape) == 3]
    assert len(experts) == 3 * NUM_LAYERS
    for param in experts:
        own = param.sharding.shard_shape(param.shape)
        assert own[0] == step[1]
        assert math.prod(own) * step[2] == param.size
