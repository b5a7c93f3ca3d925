"""Decode steps in the shapes of Llama 3.1 70B and Qwen3 235B: memory and exchanges of a device."""

import collections
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from models.platforms import GPU, TPU
from models.weight_rule import MODEL_AXIS
from tests.aot.hlo_text import parse_instructions
from tests.aot.large_models import CONFIGS, abstract_model, describe
from tests.aot.step_programs import NUM_REQS, burst
from tests.aot.tpu_topology import describe_tpus, missing_for_tpu

COMPILES_SAMPLER = True
NUM_LAYERS = 2
# (model, whether each device has its own experts)
MODELS = [("llama_70b", False), ("qwen3_235b", False), ("qwen3_235b", True)]
each = pytest.mark.parametrize("model", MODELS, ids=lambda m: m[0] + "_own_experts" * m[1])


class MeshSize:
    """Stands for a mesh where only its size is read."""

    def __init__(self, size: int) -> None:
        self.size = size


def weights_of_a_device(name: str, num_devices: int, num_layers: int) -> int:
    """Numbers of weights by hand, from config.json."""
    c = CONFIGS[name]
    hidden, heads_width = c["hidden_size"], c["num_attention_heads"] * c["head_dim"]
    # With fewer KV heads than devices, each device has the matrices of all of them.
    num_kv_parts = num_devices if c["num_key_value_heads"] % num_devices == 0 else 1
    attention = 2 * hidden * heads_width // num_devices
    attention += 2 * hidden * c["num_key_value_heads"] * c["head_dim"] // num_kv_parts
    whole = 2 * hidden  # norms
    if name == "qwen3_235b":
        mlp = 3 * hidden * c["moe_intermediate_size"] * c["num_experts"]
        whole += hidden * c["num_experts"] + 2 * c["head_dim"]  # the router, norms of q and k
    else:
        mlp = 3 * hidden * c["intermediate_size"]
    embeddings = 2 * c["vocab_size"] * hidden // num_devices
    return num_layers * (attention + mlp // num_devices + whole) + embeddings + hidden


@pytest.mark.parametrize("num_devices", [4, 8])
@each
def test_the_announced_bytes_of_weights_follow_from_the_config(model, num_devices):
    name, splits_experts = model
    structure, encoder = describe(
        *(name, MeshSize(num_devices), GPU()), num_layers=3, splits_experts=splits_experts
    )
    assert structure.weight_bytes(encoder, None) == 2 * weights_of_a_device(name, num_devices, 3)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_without_numbers_has_the_weights_of_its_structure(name):
    """Runs everywhere, so that the programs of this folder can be made where they are compiled."""
    structure, encoder = describe(name, MeshSize(1), GPU(), num_layers=2)
    model = abstract_model(structure, encoder)
    assert model.dtype == "bfloat16"
    num_bytes = sum(p.size * p.dtype.itemsize for p in model.params)
    assert num_bytes == structure.weight_bytes(encoder, None)


def test_weights_of_whole_models_are_as_large_as_published() -> None:
    # 141 and 470 GB in all.
    for name, total_gb in (("llama_70b", 141), ("qwen3_235b", 470)):
        num_bytes = 2 * weights_of_a_device(name, 4, CONFIGS[name]["num_hidden_layers"])
        assert num_bytes / 1e9 == pytest.approx(total_gb / 4, rel=0.01)


def decode_step(model, mesh, platform):
    name, splits_experts = model
    structure, encoder = describe(
        name, mesh, platform, num_layers=NUM_LAYERS, splits_experts=splits_experts
    )
    return burst(abstract_model(structure, encoder), mesh, max_steps=1)


@pytest.fixture(scope="module")
def compiled(four_h200s, compile_for_h200):
    """Makes the `StepProgram` of a decode step and its `CompiledProgram`, once for all tests."""

    @functools.cache
    def compile_step(model):
        program = decode_step(model, four_h200s.mesh, GPU())
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=program.mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each
def test_a_device_has_its_weights_and_its_cache_and_little_else(compiled, model):
    program, result = compiled(model)
    weight_bytes = 2 * weights_of_a_device(model[0], 4, NUM_LAYERS)
    arguments = result.memory.argument_size_in_bytes
    # Logits of all rows, requests' tokens and block tables.
    others = NUM_REQS * CONFIGS[model[0]]["vocab_size"] * 4 // 4 + 64 * 2**20
    assert 0 <= arguments - weight_bytes - program.cache_bytes < others
    assert result.aliased_bytes >= program.cache_bytes
    assert result.cache_copies(min_bytes=program.row_bytes) == []
    assert result.temp_bytes < 128 * 2**20


@each
def test_devices_add_two_sums_per_layer_and_exchange_no_weights(compiled, model):
    program, result = compiled(model)
    hidden_bytes = NUM_REQS * program.model.config.hidden_size * 4
    sizes = collections.Counter((c.kind, c.num_bytes) for c in result.collectives)
    assert sizes["all-reduce", hidden_bytes] == 2 * NUM_LAYERS, sizes
    # The sum of embeddings in bfloat16, and a few numbers of each row that draws.
    assert max(c.num_bytes for c in result.collectives) == hidden_bytes, sizes


@pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))
@pytest.mark.parametrize(
    "model",
    [
        # Slow, because the tests above compile Llama with the same split for four H200s.
        pytest.param(MODELS[0], id="llama_70b", marks=pytest.mark.slow),
        pytest.param(MODELS[2], id="qwen3_235b"),
    ],
)
def test_eight_v6e_chips_add_two_sums_per_layer_and_exchange_no_weights(model):
    chips = np.array(describe_tpus("v6e:2x4"))
    mesh = Mesh(chips, (MODEL_AXIS,), axis_types=(AxisType.Auto,))
    step = decode_step(model, mesh, TPU())
    jitted = jax.jit(step.function, donate_argnums=step.donate_argnums)
    program = jitted.lower(*step.args).compile()
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= step.cache_bytes
    assert memory.temp_size_in_bytes < 128 * 2**20
    sizes = collections.Counter(
        (instruction.opcode, max(instruction.array_bytes))
        for instruction in parse_instructions(program.as_text())
        if re.match("all-|reduce-scatter|collective-permute", instruction.opcode)
    )
    # In bfloat16, as is the sum of the embeddings.
    hidden_bytes = NUM_REQS * step.model.config.hidden_size * 2
    assert sizes["all-reduce", hidden_bytes] == 2 * NUM_LAYERS + 1, sizes
    assert max(num_bytes for _, num_bytes in sizes) == hidden_bytes, sizes
