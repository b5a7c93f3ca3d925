"""Decode steps in the shapes of Llama 3.1 70B and Qwen3 235B: memory and exchanges of a device."""

import collections
import functools

import pytest

from models.platforms import GPU
from tests.aot.large_models import CONFIGS, abstract_model, describe
from tests.aot.step_programs import NUM_REQS, burst

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
    mesh = MeshSize(num_devices)
    structure, encoder = describe(name, mesh, GPU(), splits_experts=splits_experts)
    num_layers = CONFIGS[name]["num_hidden_layers"]
    expected = 2 * weights_of_a_device(name, num_devices, num_layers)
    assert structure.weight_bytes(encoder) == expected
    # As published: 141 GB and 470 GB in all.
    total = {"llama_70b": 141e9, "qwen3_235b": 470e9}[name]
    assert expected == pytest.approx(total / num_devices, rel=0.01 if num_devices == 4 else 0.05)


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
