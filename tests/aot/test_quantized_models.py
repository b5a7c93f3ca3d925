"""Two layers of gpt-oss 20B in int4 and of DeepSeek V3 in FP8, compiled for an H200.

XLA widens every matrix into memory in each step: a product reads the stored numbers, writes them in
bfloat16, and reads these. The tests bound how much. `pytest -s` prints the bytes, which are in
docs/guide/tuning.md.
"""

import functools

import pytest

from models.platforms import GPU
from tests.aot.large_models import CONFIGS, abstract_model, describe
from tests.aot.step_programs import NUM_REQS, burst, mixed_step

NUM_LAYERS = 2
# So many that no activation has the size of a matrix.
NUM_MIXED_TOKENS = 2_560
# Name of the model -> quantization, and bytes of a weight without its scales.
STORED = {"gpt_oss_20b": ("int4", 0.5), "deepseek_v3": ("fp8", 1)}
WIDENED = 2  # bytes of a weight in bfloat16
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
}
ALL = [(name, kind) for name in STORED for kind in KINDS]
each = pytest.mark.parametrize("step", ALL, ids="-".join)


def quantized_sizes(structure):
    """Numbers of weights of each matrix, and of one expert of each stack."""
    matrices, experts = [], []
    for name, rule, shape in zip(structure.names, structure.rules, structure.shapes, strict=True):
        if rule.layout == "matrix" and name not in structure.routers:
            matrices.append(shape.size)
        elif rule.layout == "experts":
            experts.append(shape.size // shape.shape[0])
    return matrices, experts


@pytest.fixture(scope="module")
def compiled(h200, compile_for_h200):
    """Makes the structure, the `StepProgram` and the `CompiledProgram` of a step, once each."""

    @functools.cache
    def compile_step(step):
        name, kind = step
        structure, encoder = describe(
            *(name, h200.mesh, GPU()), num_layers=NUM_LAYERS, quantization=STORED[name][0]
        )
        program = KINDS[kind](abstract_model(structure, encoder), h200.mesh, num_blocks=4_096)
        result = compile_for_h200(
            program.function,
            *program.args,
            mesh=h200.mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )
        return structure, program, result

    return compile_step


def widened_bytes(result, sizes, *, in_loop):
    """Bytes of the buffers of widened weights, which have the size of a matrix in bfloat16."""
    return [
        num_bytes
        for instruction, num_bytes in result.fresh_buffers(min_bytes=2**20)
        if instruction.op_name.endswith("/convert_element_type")
        and "bf16[" in instruction.line.split("(")[0]
        and num_bytes // WIDENED in sizes
        and ("/while/" in instruction.op_name) == in_loop
    ]


@each
def test_a_matrix_is_widened_once_per_step_and_experts_one_by_one(compiled, step):
    structure, program, result = compiled(step)
    matrices, experts = quantized_sizes(structure)
    of_matrices = sum(widened_bytes(result, matrices, in_loop=False))
    of_experts = widened_bytes(result, experts, in_loop=True)
    stored = STORED[step[0]][1] * sum(matrices)
    # Widened weights are written and read again.
    moved = stored + 2 * of_matrices
    print(
        f"\n{step}: {result.temp_bytes / 2**20:,.0f} MiB of temporary memory. Matrices: "
        f"{stored / 2**20:,.0f} MiB stored, {WIDENED * sum(matrices) / 2**20:,.0f} MiB in "
        f"bfloat16, {of_matrices / 2**20:,.0f} MiB widened, {moved / 2**20:,.0f} MiB moved per "
        f"step. {len(of_experts)} loops widen an expert of {max(of_experts) / 2**20:,.1f} MiB."
    )
    # The lower bound fails if a product begins to read the stored numbers itself: then renew the
    # figures of docs/guide/tuning.md.
    assert 0.95 * WIDENED * sum(matrices) < of_matrices <= WIDENED * sum(matrices)
    assert len(of_experts) == len(experts)


@each
def test_temporary_memory_is_that_of_the_largest_matrix_and_of_activations(compiled, step):
    structure, program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    config = CONFIGS[step[0]]
    logits = 4 * NUM_REQS * config["vocab_size"]
    # Rows of tokens in their experts, in and out, in bfloat16; and little else.
    num_tokens = NUM_REQS if step[1] == "decode" else NUM_MIXED_TOKENS
    rows = 2 * num_tokens * config["num_experts_per_tok"] * config["hidden_size"]
    largest = WIDENED * max(quantized_sizes(structure)[0])
    assert largest < result.temp_bytes < largest + 4 * logits + 8 * rows


@each
def test_no_kernel_spills(compiled, step):
    result = compiled(step)[2]
    assert result.ptxas
    assert {kernel.name for kernel in result.ptxas if kernel.spill_bytes} == set()
