"""Shows that the checks of this folder can fail: each detects a planted bug."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import pallas_kernels
from models import KernelSettings
from models.forward.kernel_settings import TOKENS_BY_HEAD, WHOLE
from models.platforms import GPU
from models.weight_rule import MODEL_AXIS
from pallas_kernels.dispatch import mosaic_bodies

CACHE_BY_HEAD = PartitionSpec(None, None, MODEL_AXIS)
CACHE_DIMS = (2, 2 * 4096, 8, 16, 128)
CACHE_BYTES = 2 * 2 * 4096 * 8 * 16 * 128 * 2
PART_BYTES = CACHE_BYTES // 4  # the keys, or the values, of one row
NUM_TOKENS = 64
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


def scatter_args_of(gpus):
    kv_cache = gpus.array(CACHE_DIMS, jnp.bfloat16, *CACHE_BY_HEAD)
    new = gpus.array((NUM_TOKENS, 8, 128), jnp.bfloat16, *TOKENS_BY_HEAD)
    slots = gpus.array((NUM_TOKENS,), jnp.int32)
    return kv_cache, new, new, slots


@pytest.fixture
def scatter_args(h200):
    return scatter_args_of(h200)


def scatter(target, implementation=None):
    def run(kv_cache, k, v, slots):
        return pallas_kernels.kv_scatter(
            kv_cache, k, v, slots, 1, target=target, implementation=implementation
        )

    return run


def assert_in_place(program):
    assert program.cache_copies(min_bytes=PART_BYTES) == []
    assert program.aliased_bytes >= CACHE_BYTES


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_without_bug_nothing_is_reported(h200, compile_for_h200, scatter_args, implementation):
    run = scatter(h200.target, implementation)
    assert_in_place(compile_for_h200(run, *scatter_args, donate_argnums=0))


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_a_cache_that_is_not_donated_is_seen(h200, compile_for_h200, scatter_args, implementation):
    program = compile_for_h200(scatter(h200.target, implementation), *scatter_args)
    assert len(program.cache_copies(min_bytes=PART_BYTES)) == 1
    assert program.aliased_bytes == 0


@pytest.mark.parametrize("implementation", ["xla", "mosaic_gpu"])
def test_a_read_of_the_old_cache_after_the_write_is_seen(
    h200, compile_for_h200, scatter_args, implementation
):
    def run(kv_cache, k, v, slots):
        written = scatter(h200.target, implementation)(kv_cache, k, v, slots)
        # Depends on the write, so that the compiler cannot read first.
        block_idx = written[0, 0, 0, 0, 0].astype(jnp.int32)
        return written, kv_cache[0, block_idx]

    program = compile_for_h200(run, *scatter_args, donate_argnums=0)
    assert program.cache_copies(min_bytes=PART_BYTES)


def test_a_cache_updated_by_a_select_is_seen(compile_for_h200, scatter_args):
    """A fusion computes a new cache from the old one, although the output is aliased."""

    def run(kv_cache, k, v, slots):
        is_written = jax.lax.broadcasted_iota(jnp.int32, kv_cache.shape, 1) == slots[0]
        return jnp.where(is_written, k[0, 0, 0], kv_cache)

    program = compile_for_h200(run, *scatter_args, donate_argnums=0)
    assert len(program.cache_copies(min_bytes=PART_BYTES)) == 1


def test_a_row_that_is_sliced_out_of_the_cache_is_seen(compile_for_h200, scatter_args):
    def run(kv_cache, k, v, slots):
        row = kv_cache[1].at[2 * (slots // 16), :, slots % 16].set(k, mode="drop")
        return kv_cache.at[1].set(row)

    program = compile_for_h200(run, *scatter_args, donate_argnums=0)
    assert program.cache_copies(min_bytes=PART_BYTES)


def test_a_kernel_that_was_not_chosen_is_seen(h200, compile_for_h200, scatter_args):
    """As if dispatch did not know the target device, and chose the body of the CPU."""
    chosen = compile_for_h200(scatter(h200.target), *scatter_args, donate_argnums=0)
    assert chosen.kernel_names == ["kv_scatter"]
    not_chosen = compile_for_h200(scatter(None), *scatter_args, donate_argnums=0)
    assert not_chosen.kernel_names == []


def test_a_sharded_cache_that_is_gathered_is_seen(four_h200s, compile_for_h200):
    """A kernel is opaque to the compiler: without `shard_map` each device gets the whole cache."""
    args, mesh = scatter_args_of(four_h200s), four_h200s.mesh
    run = scatter(four_h200s.target)
    gathered = compile_for_h200(run, *args, mesh=mesh, donate_argnums=0)
    sizes = [c.num_bytes for c in gathered.collectives if c.kind == "all-gather"]
    assert sizes.count(CACHE_BYTES) == 1
    assert gathered.aliased_bytes == 0

    by_device = functools.partial(
        KernelSettings.for_mesh(mesh).by_device,
        run,
        in_specs=(CACHE_BY_HEAD, TOKENS_BY_HEAD, TOKENS_BY_HEAD, WHOLE),
        out_specs=CACHE_BY_HEAD,
    )
    sharded = compile_for_h200(by_device, *args, mesh=mesh, donate_argnums=0)
    assert sharded.collectives == []
    assert sharded.aliased_bytes == CACHE_BYTES // 4


def test_a_projection_split_along_the_wrong_axis_is_seen(four_h200s, compile_for_h200):
    def collectives(*spec_of_second):
        x = four_h200s.array((NUM_TOKENS, 256), jnp.bfloat16)
        first = four_h200s.array((256, 512), jnp.bfloat16, None, MODEL_AXIS)
        second = four_h200s.array((512, 256), jnp.bfloat16, *spec_of_second)
        program = compile_for_h200(
            lambda x, a, b: x @ a @ b, x, first, second, mesh=four_h200s.mesh
        )
        return [c.kind for c in program.collectives]

    assert collectives(MODEL_AXIS, None) == ["all-reduce"]
    assert collectives(None, MODEL_AXIS) != ["all-reduce"]


def test_a_kernel_outside_a_command_buffer_is_seen(h200, compile_for_h200, scatter_args):
    run = functools.partial(compile_for_h200, scatter(h200.target), *scatter_args)
    inside = run(donate_argnums=0, compiler_options=SMALLEST_GRAPH)
    assert inside.in_command_buffer == ["kv_scatter"]
    # With this option, command buffers may contain fusions only, so the kernel stays outside.
    outside = run(
        donate_argnums=0,
        compiler_options={**SMALLEST_GRAPH, "xla_gpu_enable_command_buffer": "FUSION"},
    )
    assert outside.kernel_names == ["kv_scatter"]
    assert outside.in_command_buffer == []


def test_a_loop_that_the_host_drives_is_seen(compile_for_h200):
    def run(num_steps):
        return jax.lax.fori_loop(0, num_steps, lambda _, x: x * x + 1, jnp.float32(0))

    driven_by = functools.partial(compile_for_h200, run, jnp.int32(0))
    assert driven_by(compiler_options=SMALLEST_GRAPH).loops_in_command_buffer == []
    with_loops = {**SMALLEST_GRAPH, "xla_gpu_enable_command_buffer": "FUSION,WHILE"}
    assert len(driven_by(compiler_options=with_loops).loops_in_command_buffer) == 1


def test_a_kernel_that_is_lowered_for_each_call_is_seen(h200, compile_for_h200, scatter_args):
    def in_two_rows(scatter):
        def run(kv_cache, k, v, slots):
            for row in range(2):
                kv_cache = scatter(kv_cache, k, v, slots, row)
            return kv_cache

        return compile_for_h200(run, *scatter_args, donate_argnums=0)

    outlined = in_two_rows(functools.partial(pallas_kernels.kv_scatter, target=h200.target))
    assert outlined.kernel_names == ["kv_scatter"] * 2
    assert outlined.num_lowered_kernels == outlined.num_kernels == 1
    bodies = mosaic_bodies("pallas_kernels.kv_scatter", "kv_scatter", "gpu")
    inline = in_two_rows(bodies["mosaic_gpu"].load())
    assert inline.kernel_names == ["kv_scatter"] * 2
    assert inline.num_lowered_kernels == 2


def test_weights_that_are_concatenated_are_seen(h200, compile_for_h200):
    def run(x, a, b):
        return x @ a, x @ b

    x = h200.array((NUM_TOKENS, 256), jnp.bfloat16)
    a = h200.array((256, 512), jnp.bfloat16)
    weight_bytes = 256 * 512 * 2
    options = GPU().compiler_options(["bfloat16"])
    apart = compile_for_h200(run, x, a, a, compiler_options=options)
    assert apart.concatenations(min_bytes=2 * weight_bytes) == []
    del options["xla_gpu_dot_merger_threshold_mb"]
    together = compile_for_h200(run, x, a, a, compiler_options=options)
    assert together.concatenations(min_bytes=2 * weight_bytes)


def test_conditionals_are_counted_with_their_branches(compile_for_h200):
    def run(idx, x):
        branches = [lambda x, factor=factor: jnp.sin(x * factor) for factor in range(3)]
        x = jax.lax.switch(idx, branches, x)
        return jax.lax.cond(x[0] > 0, jnp.sort, lambda x: jnp.sort(-x), x)

    program = compile_for_h200(run, jnp.int32(0), jnp.zeros(1024))
    assert sorted(program.num_branches) == [2, 3]


@pytest.mark.parametrize(("values_per_thread", "is_too_much"), [(32, False), (512, True)])
def test_spills_are_seen(h200, compile_for_h200, values_per_thread, is_too_much):
    """A thread has 255 registers. The planted kernel keeps all its values across a barrier."""
    plgpu = pytest.importorskip("jax.experimental.pallas.mosaic_gpu")

    def copy_at_once(x_ref, out_ref):
        x = x_ref[...]
        plgpu.commit_smem()
        out_ref[...] = x

    dims = (128 * values_per_thread,)
    kernel = plgpu.kernel(
        copy_at_once,
        out_type=jax.ShapeDtypeStruct(dims, jnp.float32),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name="copy_at_once",
    )
    (resources,) = compile_for_h200(kernel, h200.array(dims, jnp.float32)).ptxas
    assert resources.name == "copy_at_once"
    assert (resources.spill_bytes > 0) == is_too_much
