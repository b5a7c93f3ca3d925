"""Two layers of gpt-oss 20B in int4 and of DeepSeek V3 in FP8, compiled for H200s.

In a decode step, the kernel `scaled_matmul` reads the stored numbers of every matrix. In a step
with more tokens, XLA widens every matrix into memory: a product reads the stored numbers, writes
them in bfloat16, and reads these. The tests limit the widened bytes. The kernel
`scaled_grouped_matmul` reads the stored numbers of experts in all steps. `pytest -s` prints the
bytes, which are in docs/guide/tuning.md.
"""

import functools

import pytest

from models.platforms import GPU
from tests.aot.large_models import CONFIGS, abstract_model, describe
from tests.aot.step_programs import NUM_REQS, burst, each_step, mixed_step

COMPILES_SAMPLER = True
NUM_LAYERS = 2
# With this number of tokens, no activation has the size of a matrix.
NUM_MIXED_TOKENS = 2_560
# Name of the model -> quantization, and bytes of a weight without its scales.
STORED = {"gpt_oss_20b": ("int4", 0.5), "deepseek_v3": ("fp8", 1)}
WIDENED = 2  # bytes of a weight in bfloat16
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
}
# (model, kind of step, number of devices)
ALL = [(name, kind, 1) for name in STORED for kind in KINDS]
ALL += [("deepseek_v3", "decode", 4)]
each = each_step(ALL)


def quantized_sizes(structure, num_devices):
    """Numbers of weights that a device has of each matrix, and of one expert of each stack.

    The largest matrix is the vocabulary head.
    """
    matrices, experts = [], []
    for name, rule, shape in zip(structure.names, structure.rules, structure.shapes, strict=True):
        num_weights = shape.size // (num_devices if any(rule.axes) else 1)
        if rule.layout == "matrix" and name not in structure.routers:
            matrices.append(num_weights)
        elif rule.layout == "experts":
            experts.append(num_weights // shape.shape[0])
    return matrices, experts


@pytest.fixture(scope="module")
def compiled(h200, four_h200s, compile_for_h200):
    """Makes the structure, the `StepProgram` and the `CompiledProgram` of a step, once each."""

    @functools.cache
    def compile_step(step):
        name, kind, num_devices = step
        mesh = {1: h200, 4: four_h200s}[num_devices].mesh
        structure, encoder = describe(
            *(name, mesh, GPU()), num_layers=NUM_LAYERS, quantization=STORED[name][0]
        )
        program = KINDS[kind](abstract_model(structure, encoder), mesh, num_blocks=4_096)
        result = compile_for_h200(
            program.function,
            *program.args,
            mesh=mesh,
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


def bytes_of_sums(result):
    """Bytes of the results of all calls of `scaled_matmul`: sums of parts of the inputs."""
    calls = {c.instruction for c in result.mosaic_calls if c.kernel == "scaled_matmul"}
    return sum(max(i.array_bytes) for i in result.instructions if i.name in calls)


@each
def test_decode_steps_read_stored_numbers_and_others_widen_a_matrix_once(compiled, step):
    structure, program, result = compiled(step)
    matrices, experts = quantized_sizes(structure, step[2])
    widened = widened_bytes(result, matrices, in_loop=False)
    of_matrices = sum(widened)
    of_sums = bytes_of_sums(result)
    stored = STORED[step[0]][1] * sum(matrices)
    # Widened weights and sums are written and read again.
    moved = stored + 2 * of_matrices + 2 * of_sums
    print(
        f"\n{step}: {result.temp_bytes / 2**20:,.0f} MiB of temporary memory. Matrices: "
        f"{stored / 2**20:,.0f} MiB stored, {WIDENED * sum(matrices) / 2**20:,.0f} MiB in "
        f"bfloat16, {of_matrices / 2**20:,.0f} MiB widened, {of_sums / 2**20:,.0f} MiB of sums, "
        f"{moved / 2**20:,.0f} MiB moved per step. An expert: "
        f"{STORED[step[0]][1] * max(experts) / 2**20:,.1f} MiB stored."
    )
    num_calls = result.kernel_names.count("scaled_matmul")
    # Each matrix is read by the kernel or widened once.
    assert num_calls + len(widened) == len(matrices)
    if step[1] == "decode":
        assert widened == []
        # Most of the sums are the logits.
        assert of_sums < stored / 2
    else:
        # The vocabulary head and a part of the last layer have only a row per request, so they are
        # not widened.
        assert 0 < of_matrices <= WIDENED * (sum(matrices) - max(matrices))
    assert widened_bytes(result, experts, in_loop=True) == []
    assert result.kernel_names.count("scaled_grouped_matmul") == len(experts)


@each
def test_temporary_memory_is_that_of_the_largest_widened_matrix_and_of_activations(compiled, step):
    structure, program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    config = CONFIGS[step[0]]
    logits = 4 * NUM_REQS * config["vocab_size"]
    # The inputs and outputs of the experts, in bfloat16, with a row for each choice of a token.
    num_tokens = NUM_REQS if step[1] == "decode" else NUM_MIXED_TOKENS
    rows = 2 * num_tokens * config["num_experts_per_tok"] * config["hidden_size"]
    matrices, _ = quantized_sizes(structure, step[2])
    # The largest matrix is the head, which is never widened.
    largest = WIDENED * max(set(matrices) - {max(matrices)}) if step[1] == "mixed" else 0
    assert largest < result.temp_bytes < largest + 5 * logits + 8 * rows


@each
def test_no_kernel_spills(compiled, step):
    result = compiled(step)[2]
    assert result.ptxas
    assert {kernel.name for kernel in result.ptxas if kernel.spill_bytes} == set()
