"""Whole steps compiled for H200s: the cache stays in place, and kernels run in CUDA graphs."""

import collections
import functools

import pytest

from models.platforms import GPU
from tests.aot.step_programs import (
    MODELS,
    NUM_LAYERS,
    NUM_REQS,
    build_head,
    build_model,
    burst,
    drafting_burst,
    each_step,
    head_burst,
    mixed_step,
    verifying_step,
)

COMPILES_SAMPLER = True
NUM_MIXED_TOKENS = 256
# The kernels of attention in each kind of step. A mixed step may have decodes and prompts.
ATTENTION_KERNELS = {
    "decode": ("paged_attention_decode",),
    "burst": ("paged_attention_decode",),
    "mixed": ("paged_attention_decode", "paged_attention_ragged"),
    "verifying": ("paged_attention_decode", "paged_attention_ragged"),
    "drafting_burst": ("paged_attention_decode", "paged_attention_ragged"),
    "head_burst": ("paged_attention_decode", "paged_attention_ragged"),
}

# (model, kind of step, number of devices). Each takes seconds to compile, so some are left out.
DECODES = [(name, "decode", 1) for name in MODELS]
MIXED = [(name, "mixed", 1) for name in ("llama", "gemma3_256")]
BURSTS = [(name, "burst", 1) for name in ("llama", "gemma3_128")]
SHARDED_DECODES = [(name, "decode", 4) for name in ("llama", "gemma3_256")]
SHARDED = [*SHARDED_DECODES, ("llama", "mixed", 4), ("llama", "burst", 4)]
# Steps and bursts that verify drafts.
VERIFYING = [("llama", "verifying", 1)]
DRAFTING_BURSTS = [(name, "drafting_burst", 1) for name in ("llama", "gemma3_128")]
HEAD_BURSTS = [("llama", "head_burst", 1)]
DRAFTING = [*VERIFYING, *DRAFTING_BURSTS, *HEAD_BURSTS]
ALL = [*DECODES, *MIXED, *BURSTS, *DRAFTING, *SHARDED]
SLOW = [
    *(("llama_mha", "decode", 1), ("gemma3_128", "decode", 1), ("gemma3_256", "decode", 4)),
    *(("gemma3_128", "drafting_burst", 1), ("gemma3_256", "mixed", 1), ("llama", "burst", 4)),
]
each = functools.partial(each_step, slow=SLOW)


@pytest.fixture(scope="module")
def compiled(h200, four_h200s, compile_for_h200, tmp_path_factory):
    """Makes a step's `StepProgram` and its `CompiledProgram`, once for all tests."""
    folder = tmp_path_factory.mktemp("models")
    model = functools.cache(functools.partial(build_model, folder))
    makers = {
        "decode": functools.partial(burst, max_steps=1),
        "mixed": functools.partial(mixed_step, num_tokens=NUM_MIXED_TOKENS),
        "burst": burst,
        "verifying": verifying_step,
        "drafting_burst": drafting_burst,
        "head_burst": lambda model, mesh: head_burst(model, build_head(folder, model), mesh),
    }

    @functools.cache
    def compile_step(step):
        name, kind, num_devices = step
        mesh = {1: h200, 4: four_h200s}[num_devices].mesh
        program = makers[kind](model(name), mesh)
        return program, compile_for_h200(
            program.function,
            *program.args,
            mesh=mesh,
            donate_argnums=program.donate_argnums,
            compiler_options=GPU().compiler_options(["bfloat16"]),
        )

    return compile_step


@each(ALL)
def test_the_whole_cache_is_written_in_place(compiled, step):
    program, result = compiled(step)
    assert result.aliased_bytes >= program.cache_bytes
    assert result.cache_copies(min_bytes=program.row_bytes) == []
    assert result.temp_bytes < program.row_bytes


@each(ALL)
def test_every_layer_writes_and_attends_by_our_kernels(compiled, step):
    wanted = dict.fromkeys(("kv_scatter", *ATTENTION_KERNELS[step[1]]), NUM_LAYERS)
    if step[1] == "mixed":
        # In the last layer, only the last token of each request attends.
        wanted["paged_attention_ragged"] = NUM_LAYERS - 1
    wanted["slot_mapping"] = 1
    if step[1] == "head_burst":
        # The head's layer computes the tokens of a step, and in another loop one draft at a time.
        ragged = dict.fromkeys(ATTENTION_KERNELS[step[1]], 1)
        drafting = {"slot_mapping": 1, "paged_attention_decode": 1}
        wanted = collections.Counter(wanted) + collections.Counter(ragged | {"kv_scatter": 2})
        wanted += collections.Counter(drafting)
    assert collections.Counter(compiled(step)[1].kernel_names) == wanted


@each(ALL)
def test_no_kernel_spills(compiled, step):
    resources = compiled(step)[1].ptxas
    assert {
        (kernel.name, kernel.spill_bytes) for kernel in resources if kernel.spill_bytes
    } == set()
    assert {(kernel.name, kernel.remarks) for kernel in resources if kernel.remarks} == set()


@each([step for step in ALL if MODELS[step[0]]["head_dim"] == 128])
def test_two_ctas_of_decode_attention_fit_a_multiprocessor(compiled, step):
    """While one CTA waits for memory, the other computes."""
    decode = [k for k in compiled(step)[1].ptxas if k.name == "paged_attention_decode"]
    assert {kernel.ctas_per_sm for kernel in decode} == {2}


@each([*DECODES, *BURSTS])
def test_no_weights_are_concatenated(compiled, step):
    """XLA would otherwise concatenate weights in every step, to compute several products as one."""
    program, result = compiled(step)
    # The result would be as large as two matrices or more. Arrays of 64 tokens are smaller.
    assert result.concatenations(min_bytes=2 * program.weight_bytes) == []


@each(ALL)
def test_every_kernel_runs_inside_a_command_buffer(compiled, step):
    result = compiled(step)[1]
    assert result.in_command_buffer == result.kernel_names


@each([*BURSTS, *DRAFTING_BURSTS, *HEAD_BURSTS])
def test_a_burst_is_one_command_buffer(compiled, step):
    """The command buffer contains the loop over steps, so the host launches once per burst."""
    launched = [thunk for thunk in compiled(step)[1].thunks if not thunk.inside]
    assert [thunk.kind for thunk in launched] == ["kCommandBuffer"]
    assert compiled(step)[1].loops_in_command_buffer


@each(SHARDED)
def test_a_layer_over_four_devices_has_two_all_reduces(compiled, step):
    """One sums attention's output projection, and one the MLP's, each for all tokens."""
    program, result = compiled(step)
    # In the last layer, only the last token of each request goes on.
    num_tokens = [NUM_MIXED_TOKENS if step[1] == "mixed" else NUM_REQS] * (NUM_LAYERS - 1)
    num_tokens.append(NUM_REQS)
    hidden_bytes = program.model.config.hidden_size * 4  # summed in float32
    sums = [c for c in result.collectives if c.op_name.endswith("/dot_general")]
    assert sorted((c.kind, c.num_bytes) for c in sums) == sorted(
        ("all-reduce", n * hidden_bytes) for n in num_tokens for _ in range(2)
    )


@each(SHARDED_DECODES)
def test_a_decode_over_four_devices_also_sums_embeddings_and_little_else(compiled, step):
    """Each device has some rows of the embedding, and samples from the logits of these rows."""
    program, result = compiled(step)
    embedded_bytes = NUM_REQS * program.model.config.hidden_size * 2
    others = [c for c in result.collectives if not c.op_name.endswith("/dot_general")]
    assert ("all-reduce", embedded_bytes) in [(c.kind, c.num_bytes) for c in others]
    # The sampler's collectives: a few numbers per row, most in branches for random sampling.
    assert max(c.num_bytes for c in others) <= embedded_bytes


@each(SHARDED)
def test_nothing_as_large_as_the_logits_is_gathered(compiled, step):
    """Devices do not exchange the cache, K, V or the logits."""
    program, result = compiled(step)
    logits_bytes = NUM_REQS * program.model.config.vocab_size * 4
    assert [
        c for c in result.collectives if c.kind == "all-gather" and c.num_bytes >= logits_bytes
    ] == []
    assert max(c.num_bytes for c in result.collectives) < program.row_bytes
