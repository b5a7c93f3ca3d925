"""The ragged kernel compiled for an H200: registers, shared memory, copies and launches."""

import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.ragged_tiles import SMEM_BYTES, default_ragged_config
from tests.quick_compile import marked_sizes

NUM_ROWS, NUM_BLOCKS, NUM_TOKENS, NUM_REQS, MAX_LEN = 2, 8192, 2048, 8, 8192


@pytest.fixture
def compile_ragged(h200, compile_for_h200):
    from pallas_kernels.paged_attention.mosaic_gpu_ragged import ragged_rows_mosaic_gpu

    def run(
        head_dim=128,
        block_size=16,
        heads=(32, 8),
        dtype=jnp.bfloat16,
        compiler_options=None,
        **rules,
    ):
        num_q_heads, num_kv_heads = heads
        cache_dims = (NUM_ROWS, 2 * NUM_BLOCKS, num_kv_heads, block_size, head_dim)
        kv_cache = h200.array(cache_dims, dtype)
        integers = [
            h200.array(dims, jnp.int32)
            for dims in ((), (NUM_REQS, MAX_LEN // block_size), (NUM_REQS,), (NUM_REQS + 1,))
        ]
        q = h200.array((NUM_TOKENS, num_q_heads, head_dim), dtype)
        limits = dict.fromkeys(("sliding_window", "chunk_size", "soft_cap"))
        rules = {"scale": 0.1, "is_causal": True, "skip_single": True, **limits, **rules}
        program = compile_for_h200(
            *(ragged_rows_mosaic_gpu, q, kv_cache, *integers),
            **rules,
            compiler_options=compiler_options,
        )
        return program, kv_cache.size * kv_cache.dtype.itemsize

    return run


CALLS = [
    {"head_dim": 128},
    # The block ids of a tile are held in registers: 16 of them with blocks of 8.
    {"block_size": 256},
    {"head_dim": 256, "block_size": 8},
    *({"heads": heads} for heads in ((32, 1), (12, 4))),
    {"head_dim": 256, "chunk_size": 8192},
    {"head_dim": 512, "block_size": 8},
    {"head_dim": 512, "heads": (8, 1), "block_size": 8, "sliding_window": 1024, "soft_cap": 50.0},
    {"head_dim": 512, "heads": (4, 4), "chunk_size": 8192},
    {"head_dim": 80, "block_size": 8, "sliding_window": 100, "soft_cap": 30.0},
    # Here the memory warpgroup needs the most registers: for 16 block ids, and each tile's start.
    *({"head_dim": d, "block_size": 8, "sliding_window": 1024} for d in (64, 96, 192)),
    {"head_dim": 128, "block_size": 8, "sliding_window": 1024, "soft_cap": 50.0},
    {"head_dim": 128, "block_size": 8, "chunk_size": 8192},
    {"is_causal": False},
    {"dtype": jnp.float16},
]
# Each of these needs fewer registers than a call above, or is like a layer in `test_body_table.py`.
SLOW_CALLS = [
    *({"head_dim": head_dim} for head_dim in (64, 80, 96, 192, 256)),
    *({"block_size": block_size} for block_size in (8, 64)),
    {"head_dim": 256, "block_size": 256},
    {"heads": (32, 32)},
    {"head_dim": 256, "heads": (16, 8), "sliding_window": 1024, "soft_cap": 50.0},
    *({"head_dim": 512, "block_size": block_size} for block_size in (16, 256)),
    {"head_dim": 128, "block_size": 8, "sliding_window": 1024},
]


@pytest.mark.parametrize("call", marked_sizes(CALLS, slow=SLOW_CALLS), ids=str)
def test_no_spills_and_the_registers_and_memory_that_were_planned(compile_ragged, call):
    program, cache_bytes = compile_ragged(**call)
    assert program.kernel_names == ["paged_attention_ragged"]
    [kernel] = program.ptxas
    # A remark would report a serialized wgmma, or that warpgroups could not exchange registers.
    assert (kernel.spill_bytes, kernel.stack_bytes, kernel.remarks) == (0, 0, ())
    # All three warpgroups are launched with equally many registers. `set_max_registers` then
    # redistributes them.
    assert kernel.num_threads == 384
    assert kernel.registers == 168
    num_q_heads, num_kv_heads = call.get("heads", (32, 8))
    head_dim = call.get("head_dim", 128)
    config = default_ragged_config(
        head_dim=head_dim, group_size=num_q_heads // num_kv_heads, itemsize=2
    )
    tiles_bytes = config.smem_bytes(head_dim, 2)
    assert tiles_bytes < kernel.shared_bytes <= min(tiles_bytes + 4096, SMEM_BYTES)
    # No array is as large as the keys of one row of the cache.
    assert program.cache_copies(min_bytes=cache_bytes // NUM_ROWS // 2) == []


def test_a_call_is_launched_from_a_graph_and_copies_no_q(compile_ragged):
    program, _ = compile_ragged(compiler_options={"xla_gpu_graph_min_graph_size": 1})
    assert program.in_command_buffer == ["paged_attention_ragged"]
    assert " while(" not in program.text
    # Room for the plan, and for lse by tiles and by tokens. A second Q would take 16 MiB.
    assert program.temp_bytes < 2**20
