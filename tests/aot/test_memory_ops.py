"""The memory ops, compiled for an H200: in place, one kernel each, also inside a loop."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pallas_kernels import block_copy, block_gather, block_scatter, kv_scatter, slot_mapping

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 2, 4096, 16
NUM_TOKENS, NUM_IDS = 1024, 32
FLOATS = ("bfloat16", "float32")
DTYPES = (*FLOATS, "int8", "float8_e4m3fn")  # of raw pages
WRITING_OPS = ["kv_scatter", "block_copy", "block_scatter"]
CALLS = [
    *(("kv_scatter", dtype) for dtype in FLOATS),
    *itertools.product(WRITING_OPS[1:], DTYPES),
    ("block_copy", "uint16"),
]
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}


class Op:
    """An op that changes the cache. Its arguments are `cache` and the arrays in `rest`."""

    def __init__(self, gpus, name, dtype="bfloat16", *, head_dim=128, num_kv_heads=8, num_parts=2):
        self.name = name
        self._target = gpus.target
        ids = gpus.array((NUM_IDS,), jnp.int32)
        if name == "kv_scatter":
            cache_dims = (num_parts * NUM_BLOCKS, num_kv_heads, BLOCK_SIZE, head_dim)
            new = gpus.array((NUM_TOKENS, num_kv_heads, head_dim), jnp.bfloat16)
            slots, row = gpus.array((NUM_TOKENS,), jnp.int32), gpus.array((), jnp.int32)
            self.rest = [new, new if num_parts == 2 else None, slots, row]
        else:
            num_words = num_parts * num_kv_heads * BLOCK_SIZE * head_dim
            cache_dims = (NUM_BLOCKS, num_words)
            values = gpus.array((NUM_ROWS, NUM_IDS, num_words), dtype)
            self.rest = [ids, ids] if name == "block_copy" else [values, ids]
        self.cache = gpus.array((NUM_ROWS, *cache_dims), dtype)
        # Keys, values or latents of one row: the smallest part that a bug would copy.
        self.part_bytes = self.cache_bytes // NUM_ROWS // num_parts

    @property
    def cache_bytes(self):
        return self.cache.size * self.cache.dtype.itemsize

    def __call__(self, cache, *rest, implementation=None):
        options = {"implementation": implementation, "target": self._target}
        ops = {"kv_scatter": kv_scatter, "block_copy": block_copy, "block_scatter": block_scatter}
        return ops[self.name](cache, *rest, **options)

    def in_loop(self, cache, num_steps, *rest, implementation=None):
        """Calls the op once per step of a loop. The number of steps is known only at run time."""

        def step(carry):
            step_idx, cache = carry
            # Ids and rows depend on the step, so XLA can move nothing out of the loop.
            moved = jax.tree.map(lambda x: x + step_idx if x.dtype == jnp.int32 else x, rest)
            return step_idx + 1, self(cache, *moved, implementation=implementation)

        is_under_way = lambda carry: carry[0] < num_steps  # noqa: E731
        return lax.while_loop(is_under_way, step, (jnp.int32(0), cache))[1]


def assert_in_place(program, op):
    assert program.aliased_bytes >= op.cache_bytes
    assert program.cache_copies(min_bytes=op.part_bytes) == []
    assert program.temp_bytes < op.part_bytes


@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_the_kernel_writes_in_place(h200, compile_for_h200, name, dtype):
    op = Op(h200, name, dtype)
    program = compile_for_h200(
        op, op.cache, *op.rest, donate_argnums=0, compiler_options=SMALLEST_GRAPH
    )
    assert_in_place(program, op)
    assert program.kernel_names == [name]
    assert program.in_command_buffer == [name]
    assert [kernel.spill_bytes for kernel in program.ptxas] == [0]


@pytest.mark.parametrize("name", WRITING_OPS)
def test_the_kernel_writes_in_place_in_a_loop(h200, compile_for_h200, name):
    op = Op(h200, name)
    args = (op.cache, h200.array((), jnp.int32), *op.rest)
    program = compile_for_h200(op.in_loop, *args, donate_argnums=0)
    assert_in_place(program, op)
    assert program.kernel_names == [name]


@pytest.mark.parametrize("name", WRITING_OPS)
@pytest.mark.parametrize(
    "sizes",
    [
        *({"num_kv_heads": 1, "head_dim": head_dim} for head_dim in (64, 80)),
        {"num_kv_heads": 8, "head_dim": 96},
        {"num_kv_heads": 4, "head_dim": 256},
        {"num_kv_heads": 16, "head_dim": 192},
        {"num_kv_heads": 1, "head_dim": 576, "num_parts": 1},
    ],
    ids=str,
)
def test_other_heads_are_written_in_place(h200, compile_for_h200, name, sizes):
    op = Op(h200, name, **sizes)
    program = compile_for_h200(op, op.cache, *op.rest, donate_argnums=0)
    assert_in_place(program, op)
    assert program.kernel_names == [name]


@pytest.mark.parametrize("is_in_loop", [False, True])
@pytest.mark.parametrize(("name", "dtype"), CALLS)
def test_plain_xla_writes_in_place(h200, compile_for_h200, name, dtype, is_in_loop):
    """XLA is the body on all other GPUs."""
    op = Op(h200, name, dtype)
    run, args = op, (op.cache, *op.rest)
    if is_in_loop:
        run, args = op.in_loop, (op.cache, h200.array((), jnp.int32), *op.rest)
    program = compile_for_h200(run, *args, donate_argnums=0, implementation="xla")
    assert_in_place(program, op)
    assert program.kernel_names == []


@pytest.mark.parametrize("implementation", ["mosaic_gpu", "xla"])
@pytest.mark.parametrize("dtype", [*DTYPES, "uint16"])
def test_gathering_blocks_reads_the_cache_where_it_lies(
    h200, compile_for_h200, dtype, implementation
):
    pages = h200.array((NUM_ROWS, NUM_BLOCKS, 2 * 8 * BLOCK_SIZE * 128), dtype)
    ids = h200.array((NUM_IDS,), jnp.int32)
    program = compile_for_h200(block_gather, pages, ids, implementation=implementation)
    values_bytes = pages.size * pages.dtype.itemsize // NUM_BLOCKS * NUM_IDS
    # The largest new array is the result.
    assert program.cache_copies(min_bytes=values_bytes + 1) == []
    assert program.temp_bytes < values_bytes
    wanted = ["block_gather"] if implementation == "mosaic_gpu" else []
    assert program.kernel_names == wanted
    assert all(kernel.spill_bytes == 0 for kernel in program.ptxas)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_slot_mapping_is_one_kernel(h200, compile_for_h200, num_groups):
    arrays = (
        h200.array((num_groups, 8192), jnp.int32),
        h200.array((num_groups, 256, 512), jnp.int32),
        h200.array((257,), jnp.int32),
    )
    run = functools.partial(slot_mapping, block_size=16, pad_slot=10**8, target=h200.target)
    program = compile_for_h200(run, *arrays)
    assert program.kernel_names == ["slot_mapping"]
    assert len(program.thunks) == 1
    assert [kernel.spill_bytes for kernel in program.ptxas] == [0]


def test_as_many_ctas_share_an_sm_as_planned(h200, compile_for_h200):
    """`tma_boxes.CTA_TILE_BYTES` is chosen so that six CTAs fit."""
    op = Op(h200, "kv_scatter")
    op.rest = [h200.array((8192, *x.shape[1:]), x.dtype) for x in op.rest[:3]] + op.rest[3:]
    scatter = compile_for_h200(op, op.cache, *op.rest, donate_argnums=0)
    pages, ids = Op(h200, "block_copy").cache, op.rest[2]
    gather = compile_for_h200(block_gather, pages, ids, implementation="mosaic_gpu")
    assert [k.ctas_per_sm for k in scatter.ptxas + gather.ptxas] == [6, 6]


@pytest.mark.parametrize("name", WRITING_OPS)
def test_a_cache_that_is_not_donated_is_copied(h200, compile_for_h200, name):
    """Shows that the tests above can detect a copy."""
    op = Op(h200, name)
    program = compile_for_h200(op, op.cache, *op.rest)
    assert len(program.cache_copies(min_bytes=op.part_bytes)) == 1
    assert program.aliased_bytes == 0
