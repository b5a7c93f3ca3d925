"""The decode kernel compiled for an H200: registers, shared memory, copies and launches."""

import functools

import jax.numpy as jnp
import pytest

from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.tuned_blocks import decode_config
from tests.quick_compile import marked_cases, marked_sizes

NUM_ROWS, NUM_BLOCKS, NUM_KV_HEADS = 2, 4096, 8


def decode_arguments(
    h200,
    head_dim=128,
    block_size=16,
    group_size=4,
    num_reqs=64,
    max_len=8192,
    dtype=jnp.bfloat16,
):
    """Arguments of the op for one query token per request. The cache is by far the largest."""
    kv_cache = h200.array((NUM_ROWS, 2 * NUM_BLOCKS, NUM_KV_HEADS, block_size, head_dim), dtype)
    integers = [
        h200.array(dims, jnp.int32)
        for dims in ((), (num_reqs, max_len // block_size), (num_reqs,), (num_reqs + 1,))
    ]
    q = h200.array((num_reqs, NUM_KV_HEADS * group_size, head_dim), dtype)
    return (q, kv_cache, *integers)


@pytest.fixture
def compile_decode(h200, compile_for_h200):
    def run(sizes, **rules):
        call = functools.partial(
            paged_attention, scale=0.1, max_query_len=1, target=h200.target, **rules
        )
        return compile_for_h200(call, *decode_arguments(h200, **sizes))

    return run


def assert_as_planned(program, sizes):
    """Checks that nothing spills, ptxas has no remarks, and as many CTAs fit an SM as planned."""
    config = decode_config(
        sizes.get("dtype", jnp.bfloat16), sizes.get("head_dim", 128), sizes.get("group_size", 4)
    )
    assert program.kernel_names == ["paged_attention_decode"]
    [kernel] = program.ptxas
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
    assert kernel.ctas_per_sm >= config.ctas_per_sm
    assert kernel.registers <= (128 if config.ctas_per_sm == 2 else 255)
    return kernel


@pytest.mark.parametrize(
    "block_size, num_reqs, max_len",
    marked_cases(
        [(16, 64, 8192), (64, 8, 32_768), (16, 256, 1024)],
        slow=[(64, 64, 8192), (16, 8, 32_768), (64, 256, 1024)],
    ),
)
def test_two_ctas_share_an_sm_at_head_dim_128(compile_decode, block_size, num_reqs, max_len):
    sizes = {"block_size": block_size, "num_reqs": num_reqs, "max_len": max_len}
    kernel = assert_as_planned(compile_decode(sizes), sizes)
    assert kernel.ctas_per_sm == 2
    assert kernel.registers <= 128


# These are slow: head dims from 320 to 448, which no published model has; shapes like those of
# layers in `test_body_table.py`; and block sizes between tested ones.
@pytest.mark.parametrize(
    "sizes",
    marked_sizes(
        [
            *({"head_dim": head_dim} for head_dim in (32, 80, 96, 144, 160)),
            *({"block_size": block_size} for block_size in (8, 256)),
            {"dtype": jnp.float16},
            # The largest groups with two CTAs per SM, and the largest groups that do not spill.
            *({"group_size": group_size} for group_size in (16, 64)),
            *({"head_dim": 64, "group_size": group_size} for group_size in (24, 64)),
            *({"head_dim": 192, "group_size": group_size} for group_size in (16, 40)),
            {"head_dim": 256, "group_size": 32},
            # K and V share a ring of tiles.
            {"head_dim": 512, "block_size": 8, "group_size": 16},
        ],
        slow=[
            *({"head_dim": head_dim} for head_dim in (64, 192, 256, 320, 384, 448, 512)),
            *({"block_size": block_size} for block_size in (32, 128)),
            {"group_size": 1},
            *(
                {"head_dim": head_dim, "group_size": group_size}
                for head_dim, group_size in ((320, 24), (384, 16), (448, 16))
            ),
        ],
    ),
    ids=str,
)
def test_other_sizes_are_as_planned(compile_decode, sizes):
    assert_as_planned(compile_decode(sizes), sizes)


WINDOW, CHUNKS = {"sliding_window": 4096}, {"chunk_size": 8192}
WINDOW_AND_CAP = {"sliding_window": 1024, "soft_cap": 50.0}
WIDE = {"head_dim": 512, "group_size": 16}


@pytest.mark.parametrize(
    "sizes, rule",
    marked_cases(
        [({}, CHUNKS), ({}, WINDOW_AND_CAP), (WIDE, WINDOW), (WIDE, WINDOW_AND_CAP)],
        slow=[({}, WINDOW), (WIDE, CHUNKS)],
    ),
    ids=str,
)
def test_rules_are_as_planned(compile_decode, sizes, rule):
    assert_as_planned(compile_decode(sizes, **rule), sizes)


@pytest.mark.parametrize("max_len", marked_sizes([131_072], slow=[512]))
def test_nothing_of_the_cache_is_copied_and_memory_does_not_follow_the_table(
    compile_decode, max_len
):
    """Even with the longest table, a program needs memory only for the shares' partial results."""
    program = compile_decode({"max_len": max_len})
    assert program.cache_copies(min_bytes=NUM_BLOCKS * 16 * 128 * 2) == []
    assert program.temp_bytes < 16 << 20
