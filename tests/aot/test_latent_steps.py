"""Whole steps with DeepSeek V3's attention, compiled for H200s and for a TPU."""

import collections
import functools
import json

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from models import load_model
from models.layers.query_chunks import MAX_NUMBERS
from models.platforms import GPU, TPU
from models.weight_rule import MODEL_AXIS
from pallas_kernels.page_views import LANES
from tests.aot.step_programs import MAX_MODEL_LEN, NUM_REQS, burst, each_step, mixed_step
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu
from tests.quick_compile import marked_sizes

NUM_LAYERS, NUM_HEADS, LATENT_DIM, ROPE_DIM, HEAD_DIM, VALUE_DIM = 3, 128, 512, 64, 192, 128
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 4_096,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "max_position_embeddings": MAX_MODEL_LEN,
    "q_lora_rank": 128,
    "kv_lora_rank": LATENT_DIM,
    "qk_nope_head_dim": HEAD_DIM - ROPE_DIM,
    "qk_rope_head_dim": ROPE_DIM,
    "v_head_dim": VALUE_DIM,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
}
# So large that its queries are absorbed in chunks.
NUM_MIXED_TOKENS = 4_096
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
}
# (kind of step, number of devices)
ALL = [("decode", 1), ("mixed", 1), ("decode", 4), ("mixed", 4)]
SLOW = [("mixed", 4)]


def model_for(platform, folder):
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return load_model(folder, dtype="bfloat16", load_format="dummy", platform=platform)


def most_temporary_bytes(kind, num_devices=1, lanes=1):
    """A bound of temporary memory on one device that pads the last axis of arrays to `lanes`."""
    if kind == "decode":
        return 64 * 2**20

    def padded(*widths):
        return sum(-(-width // lanes) * lanes for width in widths)

    # All rows' queries, in two parts, and values in bfloat16. Of a chunk, the absorbed queries in
    # two parts and joined, and their output in float32 and in bfloat16; and little else.
    row_numbers = NUM_HEADS // num_devices * padded(HEAD_DIM - ROPE_DIM, ROPE_DIM, VALUE_DIM)
    chunk_numbers = MAX_NUMBERS * padded(LATENT_DIM, ROPE_DIM) // (LATENT_DIM + ROPE_DIM)
    return 2 * NUM_MIXED_TOKENS * row_numbers + (2 + 2 + 4 + 2) * chunk_numbers


@pytest.fixture(scope="module")
def compiled(h200, four_h200s, compile_for_h200, tmp_path_factory):
    """Makes a step's `StepProgram` and its `CompiledProgram`, once for all tests."""

    @functools.cache
    def compile_step(step):
        kind, num_devices = step
        mesh = {1: h200, 4: four_h200s}[num_devices].mesh
        program = KINDS[kind](model_for(GPU(), tmp_path_factory.mktemp("model")), mesh)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each_step(ALL, SLOW)
def test_the_cache_is_in_place_and_temporary_memory_has_a_bound(compiled, step):
    program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    # `row_bytes` are those of keys; a row of latents has twice as many.
    assert result.cache_copies(min_bytes=2 * program.row_bytes) == []
    assert result.temp_bytes < most_temporary_bytes(*step)


@each_step(ALL[:3])
def test_every_layer_runs_our_kernels_without_spills_in_graphs(compiled, step):
    result = compiled(step)[1]
    # A chunk of a large step may have decodes: the loop over chunks has the kernels once.
    assert collections.Counter(result.kernel_names) == {
        "slot_mapping": 1,
        **dict.fromkeys(("kv_scatter", "latent_decode", "latent_decode_merge"), NUM_LAYERS),
        "grouped_matmul": 3 * (NUM_LAYERS - 1),
    }
    # On four devices, XLA leaves products with experts out of graphs.
    outside = collections.Counter(result.kernel_names) - collections.Counter(
        result.in_command_buffer
    )
    assert set(outside) <= ({"grouped_matmul"} if step[1] == 4 else set())
    assert {kernel.name for kernel in result.ptxas if kernel.spill_bytes} == set()


@each_step([("decode", 4), ("mixed", 4)], SLOW)
def test_four_devices_exchange_neither_queries_nor_latents(compiled, step):
    collectives = compiled(step)[1].collectives
    sums = [c.kind for c in collectives if "dot_general" in c.op_name]
    # Attention, and the MLP or the experts of each layer. The shared expert is in the same sum.
    assert sums == ["all-reduce"] * (2 * NUM_LAYERS)
    num_tokens = {"decode": NUM_REQS, "mixed": NUM_MIXED_TOKENS}[step[0]]
    own_query_bytes = num_tokens * NUM_HEADS // 4 * HEAD_DIM * 2
    assert max(c.num_bytes for c in collectives) < own_query_bytes


@pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))
@pytest.mark.parametrize("kind", marked_sizes(["decode"], slow=["mixed"]))
def test_steps_on_a_v6e_keep_the_cache_in_place(tmp_path, kind):
    tpu = describe_tpu("v6e:2x2")
    mesh = Mesh(np.array([tpu.device]), (MODEL_AXIS,))
    step = KINDS[kind](model_for(TPU(), tmp_path), mesh)
    args = jax.tree.map(lambda array: tpu.array(array.shape, array.dtype), step.args)
    program = tpu.compile(step.function, *args, donate_argnums=step.donate_argnums)
    assert program.mosaic_kernels == ["kv_scatter"] * NUM_LAYERS
    assert program.memory.alias_size_in_bytes >= step.cache_bytes
    assert program.memory.temp_size_in_bytes < most_temporary_bytes(kind, lanes=LANES)
