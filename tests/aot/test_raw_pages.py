"""Programs on pages of raw words, compiled for H200s: viewing them as a cache copies nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from models.weight_rule import MODEL_AXIS
from pallas_kernels import block_copy, kv_scatter, latent_attention, paged_attention

NUM_ROWS, NUM_BLOCKS, BLOCK_SIZE = 2, 16_384, 16
NUM_REQS, MAX_LEN, NUM_STEPS, NUM_COPIES = 64, 8192, 4, 32
LATENT_DIM, ROPE_DIM = 512, 64
DECODE = ["kv_scatter", "paged_attention_decode"]
MIXED = [*DECODE, "paged_attention_ragged"]
MLA = ["kv_scatter", "latent_decode", "latent_decode_merge"]


def view_of(pages, num_parts, num_kv_heads, head_dim):
    """Views pages `[num_rows, num_blocks, words]` in the shape that the ops take."""
    num_rows, num_blocks, _ = pages.shape
    return pages.reshape(num_rows, num_parts * num_blocks, num_kv_heads, BLOCK_SIZE, head_dim)


def attend_layers(x, pages, slots, *batch, num_kv_heads, max_query_len, target):
    """Writes to each row and attends, as a model's layers do. `x` stands for all activations."""
    for row in range(NUM_ROWS):
        kv_cache = view_of(pages, 2, num_kv_heads, x.shape[-1])
        new = x[:, :num_kv_heads]
        kv_cache = kv_scatter(kv_cache, new, -new, slots, row, target=target)
        rules = {"scale": 0.1, "max_query_len": max_query_len}
        x += paged_attention(x, kv_cache, row, *batch, **rules, target=target)
        pages = kv_cache.reshape(pages.shape)
    return x, pages


def attend_latent_layers(x, pages, slots, *batch, target):
    """The same for MLA: one latent per token."""
    for row in range(NUM_ROWS):
        kv_cache = view_of(pages, 1, 1, LATENT_DIM + ROPE_DIM)
        kv_cache = kv_scatter(kv_cache, x[:, :1], None, slots, row, target=target)
        queries = (x[..., :LATENT_DIM], x[..., LATENT_DIM:])
        rules = {"scale": 0.1, "max_query_len": 1}
        out = latent_attention(*queries, kv_cache, row, *batch, **rules, target=target)
        x = x.at[..., :LATENT_DIM].add(out)
        pages = kv_cache.reshape(pages.shape)
    return x, pages


def burst(layers):
    """Several steps in one program. Each step reads the tokens that earlier steps wrote."""

    def run(x, pages, slots, *batch):
        def step(step_idx, carry):
            return layers(*carry, slots + step_idx, *batch)

        return lax.fori_loop(0, NUM_STEPS, step, (x, pages))

    return run


def arguments(gpus, *, num_q_heads=32, words, head_dim=128):
    """Arguments of the functions above. The pages are far larger than all other arrays together."""
    pages_spec = (None, None, MODEL_AXIS) if gpus.mesh.size > 1 else ()
    integers = ((NUM_REQS, MAX_LEN // BLOCK_SIZE), (NUM_REQS,), (NUM_REQS + 1,))
    return (
        gpus.array((NUM_REQS, num_q_heads, head_dim), jnp.bfloat16),
        gpus.array((NUM_ROWS, NUM_BLOCKS, words), jnp.bfloat16, *pages_spec),
        gpus.array((NUM_REQS,), jnp.int32),
        *(gpus.array(dims, jnp.int32) for dims in integers),
    )


def assert_pages_stay_where_they_are(program, pages):
    pages_bytes = math.prod(pages.sharding.shard_shape(pages.shape)) * pages.dtype.itemsize
    assert program.aliased_bytes >= pages_bytes
    assert program.cache_copies(min_bytes=pages_bytes // 64) == []
    assert program.temp_bytes < pages_bytes // 8


@pytest.mark.parametrize(
    "num_kv_heads, max_query_len, kernels, is_burst",
    [(1, 1, DECODE, True), (1, None, MIXED, False), (8, 1, DECODE, False), (8, None, MIXED, True)],
)
def test_keys_and_values(h200, compile_for_h200, num_kv_heads, max_query_len, kernels, is_burst):
    layers = functools.partial(
        attend_layers, num_kv_heads=num_kv_heads, max_query_len=max_query_len, target=h200.target
    )
    args = arguments(h200, num_q_heads=4 * num_kv_heads, words=2 * num_kv_heads * BLOCK_SIZE * 128)
    run = burst(layers) if is_burst else layers
    program = compile_for_h200(run, *args, donate_argnums=1)
    assert_pages_stay_where_they_are(program, args[1])
    # The loop's body is compiled once, with all layers.
    assert program.kernel_names == kernels * NUM_ROWS


def test_latents(h200, compile_for_h200):
    layers = functools.partial(attend_latent_layers, target=h200.target)
    head_dim = LATENT_DIM + ROPE_DIM
    args = arguments(h200, num_q_heads=16, words=BLOCK_SIZE * head_dim, head_dim=head_dim)
    program = compile_for_h200(burst(layers), *args, donate_argnums=1)
    assert_pages_stay_where_they_are(program, args[1])
    assert program.kernel_names == MLA * NUM_ROWS


def test_blocks_are_copied_before_the_layers(h200, compile_for_h200):
    """One program uses the pages as words and as keys and values."""

    def run(x, pages, slots, sources, targets, *batch):
        pages = block_copy(pages, sources, targets, target=h200.target)
        rules = {"num_kv_heads": 8, "max_query_len": 1, "target": h200.target}
        return attend_layers(x, pages, slots, *batch, **rules)

    x, pages, slots, *batch = arguments(h200, words=2 * 8 * BLOCK_SIZE * 128)
    ids = [h200.array((NUM_COPIES,), jnp.int32)] * 2
    program = compile_for_h200(run, x, pages, slots, *ids, *batch, donate_argnums=1)
    assert_pages_stay_where_they_are(program, pages)
    assert program.kernel_names == ["block_copy", *DECODE * NUM_ROWS]


def test_words_split_over_devices(four_h200s, compile_for_h200):
    """Each device has its own KV heads. Inside `shard_map`, its words are a page of these heads."""
    gpus = four_h200s
    layers = functools.partial(
        attend_layers, num_kv_heads=8 // 4, max_query_len=1, target=gpus.target
    )
    args = arguments(gpus, words=2 * 8 * BLOCK_SIZE * 128)
    by_head, by_word = PartitionSpec(None, MODEL_AXIS), PartitionSpec(None, None, MODEL_AXIS)
    split = jax.shard_map(
        layers,
        mesh=gpus.mesh,
        in_specs=(by_head, by_word, *[PartitionSpec()] * 4),
        out_specs=(by_head, by_word),
        check_vma=False,
    )
    program = compile_for_h200(split, *args, mesh=gpus.mesh, donate_argnums=1)
    assert_pages_stay_where_they_are(program, args[1])
    assert program.kernel_names == DECODE * NUM_ROWS
