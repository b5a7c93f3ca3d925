"""`latent_attention` compiled for H200s: resources of its kernels, and programs that call it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

import pallas_kernels
from models.weight_rule import MODEL_AXIS

NUM_REQS, NUM_ROWS, SEQ_LEN = 64, 2, 8192
LATENT_DIM, CACHE_DIM = 512, 576
KERNELS = ["latent_decode", "latent_decode_merge"]
SMALLEST_GRAPH = {"xla_gpu_graph_min_graph_size": 1}
RULES = {"scale": 192**-0.5, "max_query_len": 1}


def args_of(gpus, *, block_size=64, num_q_heads=64, dtype=jnp.bfloat16, heads_axis=None):
    """Arguments of the op for 64 requests of up to 8,192 tokens. The cache is the third."""
    blocks_per_req = SEQ_LEN // block_size
    cache_dims = (NUM_ROWS, NUM_REQS * blocks_per_req, 1, block_size, CACHE_DIM)
    return (
        *(
            gpus.array((NUM_REQS, num_q_heads, dim), dtype, None, heads_axis)
            for dim in (LATENT_DIM, CACHE_DIM - LATENT_DIM)
        ),
        gpus.array(cache_dims, dtype),
        gpus.array((), jnp.int32),
        gpus.array((NUM_REQS, blocks_per_req), jnp.int32),
        gpus.array((NUM_REQS,), jnp.int32),
        gpus.array((NUM_REQS + 1,), jnp.int32),
    )


def attend_on(gpus):
    return functools.partial(
        pallas_kernels.latent_attention, **RULES, return_lse=True, target=gpus.target
    )


def row_bytes(cache):
    return cache.size // NUM_ROWS * cache.dtype.itemsize


@pytest.mark.parametrize(
    "sizes",
    [
        *({"block_size": block_size} for block_size in (8, 16, 256)),
        {"num_q_heads": 128},
        {"dtype": jnp.float16},
    ],
    ids=str,
)
def test_kernels_fit_an_sm_without_spills(h200, compile_for_h200, sizes):
    program = compile_for_h200(
        attend_on(h200), *args_of(h200, **sizes), compiler_options=SMALLEST_GRAPH
    )
    assert program.kernel_names == KERNELS
    assert program.in_command_buffer == KERNELS
    attend, merge = program.ptxas
    assert (attend.spill_bytes, attend.remarks) == (0, ())
    assert (merge.spill_bytes, merge.remarks) == (0, ())
    # Four warpgroups start with 128 registers per thread, which are all registers of an SM. They
    # then redistribute the registers.
    assert (attend.num_threads, attend.registers, attend.ctas_per_sm) == (512, 128, 1)
    # Q, two tiles of 64 x 576 numbers, statistics and barriers. A CTA may have 232,448 bytes.
    assert 3 * 64 * CACHE_DIM * 2 + 1024 <= attend.shared_bytes <= 224_000
    assert merge.ctas_per_sm >= 2


def test_nothing_as_large_as_the_cache_is_made(h200, compile_for_h200):
    args = args_of(h200)
    program = compile_for_h200(attend_on(h200), *args)
    assert program.cache_copies(min_bytes=row_bytes(args[2])) == []
    # Two partial results per share, of 64 x 512 float32 each; joined queries; and little else.
    joined_bytes = NUM_REQS * 64 * CACHE_DIM * 2
    assert program.temp_bytes < (2 * 132 * 64 * LATENT_DIM * 4 + joined_bytes) * 1.05


def test_a_burst_of_steps_writes_and_reads_one_donated_cache(h200, compile_for_h200):
    def burst(q_latent, q_rope, kv_cache, slots, row, block_tables, seq_lens, query_start_loc):
        def step(_, carry):
            q_latent, kv_cache = carry
            for layer_idx in range(NUM_ROWS):
                kv_cache = pallas_kernels.kv_scatter(
                    *(kv_cache, jnp.concatenate([q_latent, q_rope], axis=-1)[:, :1], None),
                    *(slots, layer_idx),
                    target=h200.target,
                )
                sequences = (block_tables, seq_lens, query_start_loc)
                out, _ = attend_on(h200)(q_latent, q_rope, kv_cache, layer_idx, *sequences)
                q_latent = q_latent + out
            return q_latent, kv_cache

        return lax.fori_loop(0, 4, step, (q_latent, kv_cache))

    q_latent, q_rope, kv_cache, *others = args_of(h200)
    slots = h200.array((NUM_REQS,), jnp.int32)
    program = compile_for_h200(burst, q_latent, q_rope, kv_cache, slots, *others, donate_argnums=2)
    assert program.cache_copies(min_bytes=row_bytes(kv_cache)) == []
    assert program.aliased_bytes >= NUM_ROWS * row_bytes(kv_cache)
    # The loop's body is compiled once, with two layers.
    assert program.kernel_names == ["kv_scatter", *KERNELS] * 2


def test_query_heads_split_over_devices_exchange_nothing(four_h200s, compile_for_h200):
    gpus = four_h200s
    *queries, kv_cache, row, tables, lens, starts = args_of(
        gpus, num_q_heads=128, heads_axis=MODEL_AXIS
    )
    others = (kv_cache, row, tables, lens, starts)
    by_head, whole = PartitionSpec(None, MODEL_AXIS), PartitionSpec()
    # Each device has its own query heads and the whole cache, because there is only one KV head.
    split = jax.shard_map(
        attend_on(gpus),
        mesh=gpus.mesh,
        in_specs=(by_head, by_head, *[whole] * len(others)),
        out_specs=(by_head, by_head),
        check_vma=False,
    )
    program = compile_for_h200(split, *queries, *others, mesh=gpus.mesh)
    assert program.collectives == []
    assert program.kernel_names == KERNELS
    assert program.cache_copies(min_bytes=row_bytes(kv_cache)) == []


def test_steps_with_prompts_also_run_decode_rows_by_the_kernels(h200, compile_for_h200):
    args = args_of(h200)
    attend = functools.partial(
        pallas_kernels.latent_attention, scale=RULES["scale"], target=h200.target
    )
    program = compile_for_h200(attend, *args)
    assert program.kernel_names == KERNELS
    assert program.cache_copies(min_bytes=row_bytes(args[2])) == []
