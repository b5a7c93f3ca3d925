"""Whole steps of models with states, compiled for H200s and for a TPU."""

import functools
import json
import re

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from models import load_model
from models.platforms import GPU, TPU
from models.weight_rule import MODEL_AXIS
from tests.aot.step_programs import (
    MAX_MODEL_LEN,
    NUM_REQS,
    burst,
    draft_model_burst,
    drafting_burst,
    mixed_step,
    verifying_step,
)
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu

NUM_LAYERS = 3
NUM_MIXED_TOKENS = 256
_COMMON = {
    "vocab_size": 4_096,
    "hidden_size": 512,
    "intermediate_size": 1_024,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": MAX_MODEL_LEN,
}
# Recurrent layers have the heads of Qwen3-Next-80B and of Bamba-9B. The others are smaller.
CONFIGS = {
    "qwen3_5": {
        **_COMMON,
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention"] * 2 + ["full_attention"],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "bamba": {
        **_COMMON,
        "hidden_size": 2_048,
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [2],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 4,
    },
}
NUM_STATE_LAYERS = NUM_LAYERS - 1
# Most arrays of a layer's states outside of the cache, and bytes of all other temporary arrays.
MOST_STATES_HELD, MOST_STATES_HELD_ON_TPU, OTHER_BYTES = 2, 6, 64 * 2**20
# Bytes of the state of a layer and request in float32, without the window of its convolution.
STATE_BYTES = {"qwen3_5": 32 * 128 * 128 * 4, "bamba": 128 * 64 * 128 * 4}
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "burst": burst,
    "xla_decode": functools.partial(burst, max_steps=1, implementation="xla"),
    "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
    "verifying": verifying_step,
    "drafting": drafting_burst,
    "draft_model": draft_model_burst,
}
# The kernel that advances the states of a model's layers in the pages.
STEP_KERNELS = {"qwen3_5": "gated_delta_step", "bamba": "ssd_step"}
# (model, kind of step, number of devices)
DECODES = [
    *((name, "decode", num_devices) for name in STEP_KERNELS for num_devices in (1, 4)),
    ("qwen3_5", "burst", 1),
]
XLA_DECODES = [(name, "xla_decode", num_devices) for name in CONFIGS for num_devices in (1, 4)]
DRAFTING = [("qwen3_5", kind, 1) for kind in ("verifying", "drafting", "draft_model")]
ALL = [*DECODES, *XLA_DECODES, ("qwen3_5", "mixed", 1), *DRAFTING]


def each(steps):
    return pytest.mark.parametrize("step", steps, ids=lambda step: "_".join(map(str, step)))


def model_for(name, platform, folder):
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return load_model(folder, dtype="bfloat16", load_format="dummy", platform=platform)


@pytest.fixture(scope="module")
def compiled(h200, four_h200s, compile_for_h200, tmp_path_factory):
    """Makes a step's `StepProgram` and its `CompiledProgram`, once for all tests."""

    @functools.cache
    def compile_step(step):
        name, kind, num_devices = step
        mesh = {1: h200, 4: four_h200s}[num_devices].mesh
        program = KINDS[kind](model_for(name, GPU(), tmp_path_factory.mktemp("model")), mesh)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


def state_bytes(name, num_devices=1):
    """Bytes of a layer's states of all requests on each device."""
    return STATE_BYTES[name] * NUM_REQS // num_devices


@each(ALL)
def test_the_cache_is_in_place_and_temporary_memory_has_a_bound(compiled, step):
    """Temporary memory has room for a layer's states twice. All layers share it."""
    program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    assert result.temp_bytes < MOST_STATES_HELD * state_bytes(step[0], step[2]) + OTHER_BYTES


@pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))
@pytest.mark.parametrize("name", CONFIGS)
def test_a_decode_on_a_v6e_keeps_the_cache_in_place(tmp_path, name):
    tpu = describe_tpu("v6e:2x2")
    mesh = Mesh(np.array([tpu.device]), (MODEL_AXIS,))
    step = KINDS["decode"](model_for(name, TPU(), tmp_path), mesh)
    args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), step.args)
    program = tpu.compile(step.function, *args, donate_argnums=step.donate_argnums)
    assert program.memory.alias_size_in_bytes >= step.cache_bytes
    # For Gated DeltaNet 6 arrays of a layer's states: one is of its decays, and one is held because
    # the block ids, and not the numbers, depend on what was read (`rules.after`).
    most = MOST_STATES_HELD_ON_TPU * state_bytes(name) + OTHER_BYTES
    assert program.memory.temp_size_in_bytes < most


@each(DECODES)
def test_a_decode_reads_and_writes_each_state_once(compiled, step):
    """Kernels advance the states in the pages. Nothing else moves as many bytes as a state's."""
    _, result = compiled(step)
    kernel = STEP_KERNELS[step[0]]
    assert result.kernel_names.count(kernel) == NUM_STATE_LAYERS
    assert result.in_command_buffer == result.kernel_names
    assert moved_in_cache(result, state_bytes(step[0], step[2]) // 4) == 0
    assert state_copies(result, step[0], step[2]) == []


@each(XLA_DECODES[::2])
def test_copies_of_states_by_plain_xla_are_noticed(compiled, step):
    _, result = compiled(step)
    assert moved_in_cache(result, state_bytes(step[0], step[2]) // 4) > 0
    assert state_copies(result, step[0], step[2])


def state_copies(result, name, num_devices):
    """Instructions that make arrays as large as a quarter of a layer's states, or larger."""
    buffers = result.fresh_buffers(state_bytes(name, num_devices) // 4)
    return [instruction.line[:200] for instruction, _ in buffers]


@each(XLA_DECODES)
def test_plain_xla_moves_at_most_three_times_the_bytes_of_the_states(compiled, step):
    """A step must read and write the states once. It also writes and reads a temporary array.

    It moves 3 times these bytes for Gated DeltaNet, where two kernels read the temporary array, and
    2.5 times for Mamba2.
    """
    _, result = compiled(step)
    num_bytes = state_bytes(step[0], step[2])
    least = NUM_STATE_LAYERS * 2 * num_bytes
    in_cache = moved_in_cache(result, num_bytes // 4)
    assert in_cache >= least
    buffers = result.fresh_buffers(num_bytes // 4)
    temporary = sum(size * (1 + num_reads(result, buffer)) for buffer, size in buffers)
    assert in_cache + temporary <= 3 * least


@each([step for step in DECODES if step[2] > 1])
def test_four_devices_exchange_only_sums(compiled, step):
    """Each layer sums twice over devices, as with attention. All other exchanges are small.

    Mamba2's norm exchanges one number per token.
    """
    _, result = compiled(step)
    sums = [c for c in result.collectives if c.op_name.endswith("/dot_general")]
    assert [c.kind for c in sums] == ["all-reduce"] * (2 * NUM_LAYERS)
    others = [c.num_bytes for c in result.collectives if c not in sums]
    embedding_bytes = NUM_REQS * CONFIGS[step[0]]["hidden_size"] * 2
    assert all(size <= embedding_bytes for size in others)


def moved_in_cache(result, min_bytes):
    """Bytes that gathers read and scatters write, without those of fewer than `min_bytes`."""
    num_bytes = {i.name: max(i.array_bytes, default=0) for i in result.instructions}
    arrays = [i.name for i in result.instructions if i.opcode == "gather"]
    arrays += [i.operands[2] for i in result.instructions if i.opcode == "scatter"]
    return sum(num_bytes[name] for name in arrays if num_bytes[name] >= min_bytes)


def num_reads(result, buffer):
    """Number of instructions that read an instruction's result, also under another name.

    Those that read only one number of it, for `rules.after`, do not count.
    """
    names, num = {buffer.name}, 0
    for instruction in result.instructions:
        read = names & set(instruction.operands)
        if instruction.computation != buffer.computation or not read:
            continue
        if instruction.opcode in ("bitcast", "get-tuple-element"):
            names.add(instruction.name)
        elif not reads_one_number(result, instruction, read):
            num += 1
    return num


def reads_one_number(result, fusion, names):
    """Whether a fusion reads only single numbers of these operands, after ops on each number."""
    body = [i for i in result.instructions if i.computation in fusion.called]
    indices = {idx for idx, name in enumerate(fusion.operands) if name in names}
    whole = {i.name for i in body if i.opcode == "parameter" and parameter_idx(i) in indices}
    num_bytes = {i.array_bytes for i in body if i.name in whole}
    for instruction in body:
        if not whole & set(instruction.operands):
            continue
        if instruction.array_bytes in num_bytes and not instruction.is_root:
            whole.add(instruction.name)
        elif instruction.opcode != "slice" or max(instruction.array_bytes) > 4:
            return False
    return bool(whole)


def parameter_idx(instruction):
    return int(re.search(r" parameter\((\d+)\)", instruction.line)[1])
