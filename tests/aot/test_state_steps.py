"""Whole steps of models with states, compiled for H200s and for a TPU."""

import functools
import json
import math
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
    each_step,
    mixed_step,
    verifying_step,
)
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu
from tests.quick_compile import marked_sizes

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
# Recurrent layers have the sizes of Qwen3-Next-80B, Bamba-9B, Falcon-Mamba-7B, Jamba-Mini and
# RecurrentGemma-2B. Other layers of the first two are smaller, and Jamba has no experts.
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
    "falcon_mamba": {
        **_COMMON,
        "hidden_size": 4_096,
        "architectures": ["FalconMambaForCausalLM"],
        "intermediate_size": 8_192,
        "state_size": 16,
        "time_step_rank": 256,
        "conv_kernel": 4,
    },
    "jamba": {
        **_COMMON,
        "hidden_size": 4_096,
        "intermediate_size": 14_336,
        "architectures": ["JambaForCausalLM"],
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_experts": 1,
        "attn_layer_period": 3,
        "attn_layer_offset": 2,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": 256,
    },
    "recurrent_gemma": {
        **_COMMON,
        "hidden_size": 2_560,
        "intermediate_size": 7_680,
        "architectures": ["RecurrentGemmaForCausalLM"],
        "num_attention_heads": 10,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "lru_width": 2_560,
        "attention_window_size": 2_048,
        "conv1d_width": 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "logits_soft_cap": 30.0,
    },
}
# Layers with states. All layers of a Falcon-Mamba have them.
NUM_STATE_LAYERS = dict.fromkeys(CONFIGS, NUM_LAYERS - 1) | {"falcon_mamba": NUM_LAYERS}
# Most arrays of a layer's states outside of the cache, and bytes of all other temporary arrays.
MOST_STATES_HELD, MOST_STATES_HELD_ON_TPU, OTHER_BYTES = 2, 6, 64 * 2**20
# Bytes of the state of a layer and request in float32, without the window of its convolution.
STATE_BYTES = {
    "qwen3_5": 32 * 128 * 128 * 4,
    "bamba": 128 * 64 * 128 * 4,
    "falcon_mamba": 16 * 8_192 * 4,
    "jamba": 16 * 8_192 * 4,
    "recurrent_gemma": 2_560 * 4,
}
# The same of the windows.
WINDOW_BYTES = {"falcon_mamba": 3 * 8_192 * 4, "jamba": 3 * 8_192 * 4}
# Bytes that a v6e moves for states, divided by those of one read and one write of each state.
MOVED_ON_TPU = {"qwen3_5": 4.0, "bamba": 3.5, "falcon_mamba": 9.5, "jamba": 5.75}
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
STEP_KERNELS = {
    "qwen3_5": "gated_delta_step",
    "bamba": "ssd_step",
    "falcon_mamba": "selective_step",
    "jamba": "selective_step",
}
# Models whose states are whole on each device of a mesh.
WHOLE_STATES = ("falcon_mamba", "jamba")
# (model, kind of step, number of devices)
SPLIT_DECODES = [
    (name, "decode", num_devices) for name in ("qwen3_5", "bamba") for num_devices in (1, 4)
]
DECODES = [
    *SPLIT_DECODES,
    *((name, "burst", 1) for name in ("qwen3_5", "falcon_mamba")),
    *(("jamba", "decode", num_devices) for num_devices in (1, 4)),
]
XLA_DECODES = [
    *((name, "xla_decode", num_devices) for name, _, num_devices in SPLIT_DECODES),
    ("jamba", "xla_decode", 1),
]
# A slot of Falcon-Mamba is one page. The others have several.
ONE_PAGE = ("falcon_mamba", "xla_decode", 1)
VECTORS = ("recurrent_gemma", "decode", 1)
DRAFTING = [("qwen3_5", kind, 1) for kind in ("verifying", "drafting", "draft_model")]
ALL = [*DECODES, *XLA_DECODES, ONE_PAGE, VECTORS, ("qwen3_5", "mixed", 1), *DRAFTING]
# Where kernels exist, an H200 runs plain XLA only if it is told to, so one such step is enough. The
# kernel of Jamba is also in its step for four devices, and in the burst of Falcon-Mamba.
SLOW = [
    *XLA_DECODES[1:],
    ONE_PAGE,
    *(("qwen3_5", "burst", 1), ("qwen3_5", "draft_model", 1)),
    ("jamba", "decode", 1),
]
each = functools.partial(each_step, slow=SLOW)


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
    return STATE_BYTES[name] * NUM_REQS // (1 if name in WHOLE_STATES else num_devices)


@each(ALL)
def test_the_cache_is_in_place_and_temporary_memory_has_a_bound(compiled, step):
    """Temporary memory has room for a layer's states twice. All layers share it."""
    program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    assert result.temp_bytes < MOST_STATES_HELD * state_bytes(step[0], step[2]) + OTHER_BYTES


@pytest.fixture(scope="module")
def compiled_for_tpu(tmp_path_factory):
    """Makes the `StepProgram` and the `TpuProgram` of a model's decode step."""

    @functools.cache
    def compile_step(name):
        tpu = describe_tpu("v6e:2x2")
        mesh = Mesh(np.array([tpu.device]), (MODEL_AXIS,))
        step = KINDS["decode"](model_for(name, TPU(), tmp_path_factory.mktemp("model")), mesh)
        args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), step.args)
        return step, tpu.compile(step.function, *args, donate_argnums=step.donate_argnums)

    return compile_step


needs_tpu_compiler = pytest.mark.skipif(
    missing_for_tpu() is not None, reason=str(missing_for_tpu())
)


QUICK_ON_TPU = ("qwen3_5", "bamba")
each_on_tpu = pytest.mark.parametrize(
    "name", marked_sizes(QUICK_ON_TPU, slow=sorted(MOVED_ON_TPU.keys() - QUICK_ON_TPU))
)


@needs_tpu_compiler
@each_on_tpu
def test_a_decode_on_a_v6e_keeps_the_cache_in_place(compiled_for_tpu, name):
    step, program = compiled_for_tpu(name)
    assert program.memory.alias_size_in_bytes >= step.cache_bytes
    most = MOST_STATES_HELD_ON_TPU * state_bytes(name) + OTHER_BYTES
    assert program.memory.temp_size_in_bytes < most


@needs_tpu_compiler
@each_on_tpu
def test_a_decode_on_a_v6e_moves_no_more_bytes_than_before(compiled_for_tpu, name):
    """No kernel advances states on a TPU."""
    _, program = compiled_for_tpu(name)
    num_bytes, least = state_bytes(name), least_bytes((name, "decode", 1))
    moved = program.bytes_moved(num_bytes // 2, num_bytes * 3 // 2) / least
    assert moved == pytest.approx(MOVED_ON_TPU[name], abs=0.05)


@each(DECODES)
def test_a_decode_reads_and_writes_each_state_once(compiled, step):
    """Kernels advance the states in the pages. Nothing else moves as many bytes as a state's."""
    _, result = compiled(step)
    kernel = STEP_KERNELS[step[0]]
    assert result.kernel_names.count(kernel) == NUM_STATE_LAYERS[step[0]]
    assert result.in_command_buffer == result.kernel_names
    assert moved_in_cache(result, state_bytes(step[0], step[2]) // 2) == 0
    assert state_copies(result, step[0], step[2]) == []


@each([*XLA_DECODES[::2], ONE_PAGE])
def test_copies_of_states_by_plain_xla_are_noticed(compiled, step):
    _, result = compiled(step)
    assert moved_in_cache(result, state_bytes(step[0], step[2]) // 2) > 0
    assert state_copies(result, step[0], step[2])


def state_copies(result, name, num_devices):
    """Instructions that make arrays as large as half of a layer's states, or larger."""
    buffers = result.fresh_buffers(state_bytes(name, num_devices) // 2)
    return [instruction.line[:200] for instruction, _ in buffers]


@each(XLA_DECODES)
def test_plain_xla_moves_at_most_three_times_the_bytes_of_the_states(compiled, step):
    """A step must read and write the states once. It also writes and reads a temporary array.

    It moves 3 times these bytes for Gated DeltaNet, where two kernels read the temporary array, and
    2.5 times for Mamba2 and Jamba.
    """
    _, result = compiled(step)
    least, moved = least_bytes(step), bytes_moved(result, state_bytes(step[0], step[2]) // 2)
    assert least < moved <= 3 * least


@pytest.mark.slow
def test_plain_xla_moves_more_if_one_page_has_a_window_and_a_state(compiled):
    """XLA then cuts the state out of what it gathers, which stores the state twice: 3.9 times."""
    _, result = compiled(ONE_PAGE)
    least, moved = least_bytes(ONE_PAGE), bytes_moved(result, state_bytes("falcon_mamba") // 2)
    assert 3 * least < moved < 4 * least


@each([step for step in DECODES if step[0] in WINDOW_BYTES and step[2] == 1])
def test_windows_of_mamba_need_no_kernel(compiled, step):
    """With its window, a state moves less than twice the bytes of one read and one write."""
    _, result = compiled(step)
    name, window_bytes = step[0], WINDOW_BYTES[step[0]] * NUM_REQS
    with_windows = least_bytes(step) + NUM_STATE_LAYERS[name] * 2 * window_bytes
    moved = bytes_moved(result, window_bytes // 2) + least_bytes(step)
    assert with_windows < moved < 2 * with_windows


def test_units_of_recurrent_gemma_need_no_kernel(compiled):
    """A state is one vector. All arrays together have few bytes compared with the weights."""
    program, result = compiled(VECTORS)
    weights = sum(math.prod(param.shape) * param.dtype.itemsize for param in program.args[0])
    moved = bytes_moved(result, state_bytes("recurrent_gemma") // 2)
    assert least_bytes(VECTORS) < moved < weights // 2


def least_bytes(step):
    """Bytes of one read and one write of the states of all layers, on each device."""
    return NUM_STATE_LAYERS[step[0]] * 2 * state_bytes(step[0], step[2])


def bytes_moved(result, min_bytes):
    """Bytes read from the cache, written to it, and moved for temporary arrays.

    Arrays of fewer than `min_bytes` and products do not count.
    """
    buffers = result.fresh_buffers(min_bytes)
    buffers = [(buffer, size) for buffer, size in buffers if "gemm" not in buffer.name]
    temporary = sum(size + bytes_read(result, buffer, size) for buffer, size in buffers)
    return moved_in_cache(result, min_bytes) + temporary


@each([step for step in SPLIT_DECODES if step[2] > 1])
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


def bytes_read(result, buffer, size):
    """Bytes that instructions read of an instruction's result, also under another name."""
    names, num_bytes = {buffer.name}, 0
    for instruction in result.instructions:
        read = names & set(instruction.operands)
        if instruction.computation != buffer.computation or not read:
            continue
        if instruction.opcode in ("bitcast", "get-tuple-element"):
            names.add(instruction.name)
        else:
            in_slices = bytes_of_slices(result, instruction, read)
            num_bytes += size if in_slices is None else in_slices
    return num_bytes


def bytes_of_slices(result, fusion, names):
    """Bytes that a fusion reads of these operands if it reads only slices of them; otherwise None.

    The slices may be of what ops on each number make of the operands. Single numbers, which
    `rules.after` reads, do not count.
    """
    body = [i for i in result.instructions if i.computation in fusion.called]
    indices = {idx for idx, name in enumerate(fusion.operands) if name in names}
    whole = {i.name for i in body if i.opcode == "parameter" and parameter_idx(i) in indices}
    num_bytes, in_slices = {i.array_bytes for i in body if i.name in whole}, 0
    for instruction in body:
        if not whole & set(instruction.operands):
            continue
        if instruction.array_bytes in num_bytes and not instruction.is_root:
            whole.add(instruction.name)
        elif instruction.opcode == "slice":
            in_slices += sum(size for size in instruction.array_bytes if size > 4)
        else:
            return None
    return in_slices if whole else None


def parameter_idx(instruction):
    return int(re.search(r" parameter\((\d+)\)", instruction.line)[1])
