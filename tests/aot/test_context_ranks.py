"""Steps whose devices share the positions of each request, compiled for H200s and for TPUs."""

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
from tests.aot.large_models import abstract_model, describe
from tests.aot.step_programs import NUM_REQS, burst, mixed_step
from tests.aot.tpu_topology import describe_tpus, missing_for_tpu

NUM_LAYERS = 2
LATENT_DIM, ROPE_DIM, NUM_HEADS = 512, 64, 128  # of DeepSeek V3
NUM_MIXED_TOKENS = 512
MAX_CHUNK_TOKENS = 256  # of queries that are absorbed at once
KINDS = {
    "decode": functools.partial(burst, max_steps=1),
    "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
}


def make_step(kind, name, mesh, platform, num_ranks):
    structure, encoder = describe(name, mesh, platform, num_layers=NUM_LAYERS)
    model = abstract_model(structure, encoder)
    return KINDS[kind](model, mesh, num_context_ranks=num_ranks)


@pytest.fixture(scope="module")
def compiled(four_h200s, compile_for_h200):
    """Makes the `StepProgram` of DeepSeek V3's shape, and its `CompiledProgram`, once."""

    @functools.cache
    def compile_step(kind):
        program = make_step(kind, "deepseek_v3", four_h200s.mesh, GPU(), 4)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=program.mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_is_in_place_and_temporary_memory_has_a_bound(compiled, kind):
    program, result = compiled(kind)
    assert result.aliased_bytes >= program.cache_bytes
    assert result.cache_copies(min_bytes=2 * program.row_bytes) == []
    assert result.temp_bytes < {"decode": 64, "mixed": 160}[kind] * 2**20


def test_decode_steps_run_our_kernels(compiled):
    assert collections.Counter(compiled("decode")[1].kernel_names) == {
        "slot_mapping": 1,
        **dict.fromkeys(("kv_scatter", "latent_decode", "latent_decode_merge"), NUM_LAYERS),
        "grouped_matmul": 3,
    }


@pytest.mark.parametrize("kind", KINDS)
def test_devices_exchange_queries_and_partial_results_once_per_layer(compiled, kind):
    program, result = compiled(kind)
    sizes = collections.Counter((c.kind, c.num_bytes) for c in result.collectives)
    query_bytes = NUM_HEADS * (LATENT_DIM + ROPE_DIM) * 2
    # A log-sum-exp in float32 has the bits of two values in bfloat16.
    partial_bytes = NUM_HEADS * (LATENT_DIM + 2) * 2
    # A step with prompts exchanges them once for each chunk of queries.
    loops = {"decode": {NUM_REQS: NUM_LAYERS}, "mixed": {NUM_REQS: 1, MAX_CHUNK_TOKENS: 1}}[kind]
    for num_tokens, count in loops.items():
        assert sizes.pop(("all-gather", num_tokens * query_bytes)) == count, sizes
        assert sizes.pop(("all-to-all", num_tokens * partial_bytes)) == count, sizes
    # The other exchanges are of sums of hidden states in float32, at most two at once (experts and
    # shared experts), and of a few numbers of each row, for its most likely token.
    num_tokens = {"decode": NUM_REQS, "mixed": NUM_MIXED_TOKENS}[kind]
    hidden_bytes = num_tokens * program.model.config.hidden_size * 4
    assert max(num_bytes for _, num_bytes in sizes) <= 2 * hidden_bytes, sizes


@pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))
def test_pairs_of_v6e_chips_share_positions_in_place():
    chips = np.array(describe_tpus("v6e:2x4"))
    mesh = Mesh(chips, (MODEL_AXIS,), axis_types=(AxisType.Auto,))
    step = make_step("decode", "qwen3_235b", mesh, TPU(), 2)
    jitted = jax.jit(step.function, donate_argnums=step.donate_argnums)
    program = jitted.lower(*step.args).compile()
    memory = program.memory_analysis()
    sizes = collections.Counter(
        (instruction.opcode, max(instruction.array_bytes))
        for instruction in parse_instructions(program.as_text())
        if re.match("all-|reduce-scatter|collective-permute", instruction.opcode)
    )
    # Each of 8 devices has 8 of 64 query heads, and gets those of its neighbor too.
    num_values = NUM_REQS * 2 * 8
    assert sizes["all-gather", num_values * 128 * 2] == NUM_LAYERS, sizes
    assert sizes["all-to-all", num_values * (128 + 2) * 2] == NUM_LAYERS, sizes
    assert max(num_bytes for _, num_bytes in sizes) <= NUM_REQS * 4_096 * 2, sizes
    assert memory.alias_size_in_bytes >= step.cache_bytes
    assert memory.temp_size_in_bytes < 64 * 2**20
