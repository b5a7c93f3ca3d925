"""Compiles the Mosaic TPU bodies for v5e and v6e: the calls they accept, and no copied cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import block_copy, kv_scatter, latent_attention, paged_attention
from pallas_kernels.kv_scatter import mosaic_tpu as scatter_body
from pallas_kernels.page_views import unview_pages, view_pages
from pallas_kernels.paged_attention import mosaic_tpu as attention_body
from tests.aot.tpu_topology import describe_tpu, missing_for_tpu
from tests.quick_compile import marked_cases, marked_sizes

pytestmark = pytest.mark.skipif(missing_for_tpu() is not None, reason=str(missing_for_tpu()))

BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.fixture(scope="module")
def tpu(request):
    return describe_tpu(f"{request.param}:2x2")


def on_tpus(names, *, on_v5e):
    """The parameters `tpu` and `name`: all cases on a v6e, and some on a v5e. Others are slow.

    Both chips have as much VMEM and SMEM, so tiles are equal. On a v5e, cases near these limits and
    cases with other arithmetic are compiled.
    """
    cases = [("v6e", name) for name in names] + [("v5e", name) for name in on_v5e]
    slow = [("v5e", name) for name in names if name not in on_v5e]
    return pytest.mark.parametrize("tpu, name", marked_cases(cases, slow=slow), indirect=["tpu"])


# On a v5e, the test is slow.
on_v6e = pytest.mark.parametrize("tpu", marked_sizes(["v6e"], slow=["v5e"]), indirect=True)


NUM_ROWS = 2
# Bytes of one row of a cache. No other array is as large, so a copy of a row cannot hide.
ROW_BYTES = 2**28


def kv_cache(tpu, num_kv_heads=8, head_dim=128, block_size=16, dtype=BF16, num_parts=2):
    block_bytes = num_parts * num_kv_heads * block_size * head_dim * jnp.dtype(dtype).itemsize
    num_blocks = -(-ROW_BYTES // block_bytes)
    dims = (NUM_ROWS, num_parts * num_blocks, num_kv_heads, block_size, head_dim)
    return tpu.array(dims, dtype)


def attention_arrays(
    tpu,
    num_tokens=64,
    num_q_heads=32,
    dtype=BF16,
    cache_dtype=None,
    num_reqs=8,
    max_blocks=64,
    **cache_sizes,
):
    cache = kv_cache(tpu, dtype=cache_dtype or dtype, **cache_sizes)
    return (
        tpu.array((num_tokens, num_q_heads, cache.shape[-1]), dtype),
        *(cache, tpu.array((), jnp.int32)),
        tpu.array((num_reqs, max_blocks), jnp.int32),
        tpu.array((num_reqs,), jnp.int32),
        tpu.array((num_reqs + 1,), jnp.int32),
    )


PLAIN_RULES = {
    "scale": 0.1,
    "is_causal": True,
    "sliding_window": None,
    "chunk_size": None,
    "soft_cap": None,
    "kv_dtype": None,
    "max_query_len": None,
}


def array_bytes(array):
    return int(np.prod(array.shape)) * array.dtype.itemsize


# Name -> sizes of the arrays, rules of the call.
ATTENTION = {
    "plain": ({}, {}),
    "decode": ({}, {"max_query_len": 1}),
    "float32": ({"dtype": F32}, {}),
    "float32_over_bfloat16": ({"dtype": F32, "cache_dtype": BF16}, {}),
    "window_soft_cap_sinks": ({}, {"sliding_window": 100, "soft_cap": 30.0, "has_sinks": True}),
    "chunks": ({}, {"chunk_size": 96}),
    "not_causal": ({}, {"is_causal": False}),
    "mha": ({"num_q_heads": 32, "num_kv_heads": 32}, {}),
    "mqa": ({"num_kv_heads": 1}, {}),
    "one_head": ({"num_q_heads": 1, "num_kv_heads": 1, "dtype": F32}, {}),
    "group_of_3": ({"num_q_heads": 24}, {}),
    "group_of_7": ({"num_q_heads": 28, "num_kv_heads": 4}, {"max_query_len": 1}),
    "head_dim_256": ({"head_dim": 256}, {}),
    "head_dim_512": ({"head_dim": 512, "num_kv_heads": 1, "block_size": 64}, {}),
    **{f"block_{n}": ({"block_size": n}, {}) for n in (8, 32, 48, 64, 128, 256)},
    "block_8_float32": ({"block_size": 8, "dtype": F32}, {}),
    "few_tokens": ({"num_tokens": 3, "num_reqs": 3}, {}),
    "many_tokens": ({"num_tokens": 4096, "num_reqs": 256, "max_blocks": 8192}, {}),
    # Near the limits that `misfit` names.
    "long_tables": ({"max_blocks": 90_000}, {}),
    "many_requests": ({"num_tokens": 16_384, "num_reqs": 16_384}, {}),
    "much_vmem": (
        {
            "num_q_heads": 36,
            "num_kv_heads": 36,
            "head_dim": 256,
            "block_size": 256,
            "dtype": F32,
        },
        {},
    ),
}


ATTENTION_ON_V5E = (
    *("plain", "mha", "block_8", "window_soft_cap_sinks", "float32_over_bfloat16"),
    *("many_tokens", "long_tables", "many_requests", "much_vmem"),
)


@on_tpus(ATTENTION, on_v5e=ATTENTION_ON_V5E)
def test_attention_compiles_wherever_nothing_misfits(name, tpu):
    sizes, rules = ATTENTION[name]
    rules = dict(rules)
    arrays = attention_arrays(tpu, **sizes)
    traced_options = {"sinks": None, "alibi_slopes": None}
    if rules.pop("has_sinks", False):
        traced_options["sinks"] = tpu.array((arrays[0].shape[1],), F32)
    rules = {**PLAIN_RULES, **rules}
    assert attention_body.misfit(*arrays, **rules, **traced_options) is None

    def call(traced_options, *arrays):
        return attention_body.paged_attention_mosaic_tpu(*arrays, **rules, **traced_options)

    program = tpu.compile(call, traced_options, *arrays)
    assert program.mosaic_kernels == ["paged_attention_ragged"]
    assert program.buffers_of(ROW_BYTES) == []


SCATTER = {
    "decode": {},
    "one_token": {"num_tokens": 1},
    "prompt": {"num_tokens": 2048, "block_size": 64},
    "prompt_float32": {"num_tokens": 2048, "dtype": F32},
    "block_8": {"block_size": 8},
    "prompt_block_48": {"num_tokens": 1024, "block_size": 48},
    "prompt_block_256": {"num_tokens": 1024, "block_size": 256},
    "one_head": {"num_kv_heads": 1, "head_dim": 256},
    "latents": {"num_kv_heads": 1, "head_dim": 640, "num_parts": 1},
    "prompt_latents": {
        **{"num_tokens": 1024, "block_size": 64},
        **{"num_kv_heads": 1, "head_dim": 640, "num_parts": 1},
    },
    "mha": {"num_kv_heads": 32},
    # Near the limit of VMEM that `misfit` names.
    "much_vmem": {
        "num_tokens": 512,
        "num_kv_heads": 80,
        "head_dim": 256,
        "block_size": 64,
        "dtype": F32,
    },
}


def scatter_arrays(tpu, num_tokens=64, num_parts=2, **cache_sizes):
    cache = kv_cache(tpu, num_parts=num_parts, **cache_sizes)
    new = tpu.array((num_tokens, cache.shape[2], cache.shape[-1]), cache.dtype)
    return (
        *(cache, new, new if num_parts == 2 else None),
        tpu.array((num_tokens,), jnp.int32),
        tpu.array((), jnp.int32),
    )


@on_tpus(SCATTER, on_v5e=("decode", "prompt_latents", "much_vmem"))
def test_scatter_writes_in_place_wherever_nothing_misfits(name, tpu):
    arrays = scatter_arrays(tpu, **SCATTER[name])
    assert scatter_body.misfit(*arrays) is None
    program = tpu.compile(scatter_body.kv_scatter_mosaic_tpu, *arrays, donate_argnums=(0,))
    assert program.mosaic_kernels == ["kv_scatter"]
    assert program.buffers_of(ROW_BYTES) == []
    assert program.memory.alias_size_in_bytes == array_bytes(arrays[0])


NUM_LAYERS = 2


def step(pages, q, slots, block_tables, seq_lens, query_start_loc, *, sizes, target):
    """Layers that write to their row of the raw pages and then read the row, as a model does."""
    num_kv_heads = sizes["num_kv_heads"]
    for layer_idx in range(NUM_LAYERS):
        k, v = jnp.sin(q[:, :num_kv_heads]), jnp.cos(q[:, -num_kv_heads:])
        cache = view_pages(pages, num_parts=2, **sizes)
        cache = kv_scatter(cache, k, v, slots, layer_idx, target=target)
        q = paged_attention(
            *(q, cache, layer_idx, block_tables, seq_lens, query_start_loc),
            scale=0.1,
            target=target,
        )
        pages = unview_pages(cache, pages.shape)
    return pages, q


def burst(pages, q, slots, block_tables, seq_lens, query_start_loc, **options):
    """Several steps in one loop. Their number is the length of the first sequence."""

    def body(state):
        step_idx, *state = state
        state = step(*state, slots, block_tables, seq_lens, query_start_loc, **options)
        return step_idx + 1, *state

    state = (jnp.int32(0), pages, q)
    return jax.lax.while_loop(lambda state: state[0] < seq_lens[0], body, state)[1:]


def raw_pages(tpu, dtype, num_kv_heads, block_size, head_dim):
    num_lines = 2 * num_kv_heads * block_size * head_dim // 128
    num_blocks = ROW_BYTES // (num_lines * 128 * jnp.dtype(dtype).itemsize)
    return tpu.array((NUM_ROWS, num_blocks, num_lines, 128), dtype)


PAGES = {
    "head_dim_128": (BF16, {"num_kv_heads": 8, "block_size": 16, "head_dim": 128}),
    "head_dim_256": (BF16, {"num_kv_heads": 4, "block_size": 16, "head_dim": 256}),
    "head_dim_512": (BF16, {"num_kv_heads": 1, "block_size": 64, "head_dim": 512}),
    "float32_block_8": (F32, {"num_kv_heads": 8, "block_size": 8, "head_dim": 256}),
}


@on_tpus(PAGES, on_v5e=("head_dim_128",))
@pytest.mark.parametrize("function", [step, burst], ids=["step", "burst"])
def test_step_on_raw_pages_picks_the_kernels_and_copies_no_cache(function, name, tpu):
    dtype, sizes = PAGES[name]
    pages = raw_pages(tpu, dtype, **sizes)
    num_q_heads = 4 * sizes["num_kv_heads"]
    q, _, _, *tables = attention_arrays(tpu, dtype=dtype, num_q_heads=num_q_heads, **sizes)
    slots = tpu.array((q.shape[0],), jnp.int32)
    function = functools.partial(function, sizes=sizes, target=tpu.target)
    program = tpu.compile(function, pages, q, slots, *tables, donate_argnums=(0,))
    assert program.mosaic_kernels == ["kv_scatter", "paged_attention_ragged"] * NUM_LAYERS
    assert program.buffers_of(ROW_BYTES) == []
    assert program.memory.temp_size_in_bytes < ROW_BYTES // 50
    assert program.memory.alias_size_in_bytes >= array_bytes(pages)
    # The segments of `kv_scatter` are listed once for all layers.
    assert program.num_sorts == 1


def latent_step(pages, latents, q, slots, block_tables, seq_lens, query_start_loc, *, target):
    """Layers with latent attention: all heads share one vector per token."""
    sizes = {"num_kv_heads": 1, "block_size": 64, "head_dim": 640}
    for layer_idx in range(NUM_LAYERS):
        cache = view_pages(pages, num_parts=1, **sizes)
        cache = kv_scatter(cache, latents, None, slots, layer_idx, target=target)
        out = latent_attention(
            *(q[..., :512], q[..., 512:576], cache, layer_idx),
            *(block_tables, seq_lens, query_start_loc),
            scale=0.1,
            max_query_len=1,
            target=target,
        )
        latents = latents + out[:, :1, :1]
        q = q + out[:, :, :1]
        pages = unview_pages(cache, pages.shape)
    return pages, q


@on_v6e
def test_step_on_raw_pages_of_latents_copies_no_cache(tpu):
    num_reqs = 64
    pages = tpu.array((NUM_ROWS, 4096, 64 * 640 // 128, 128), BF16)
    program = tpu.compile(
        functools.partial(latent_step, target=tpu.target),
        *(pages, tpu.array((num_reqs, 1, 640), BF16), tpu.array((num_reqs, 16, 640), BF16)),
        *(tpu.array((num_reqs,), jnp.int32), tpu.array((num_reqs, 64), jnp.int32)),
        *(tpu.array((num_reqs,), jnp.int32), tpu.array((num_reqs + 1,), jnp.int32)),
        donate_argnums=(0,),
    )
    assert program.mosaic_kernels == ["kv_scatter"] * NUM_LAYERS
    assert program.buffers_of(ROW_BYTES) == []
    assert program.memory.temp_size_in_bytes < ROW_BYTES // 50
    assert program.memory.alias_size_in_bytes == array_bytes(pages)


@on_v6e
def test_a_plain_reshape_of_raw_pages_would_copy_the_cache(tpu):
    """This is why `view_pages` keeps the order of the tiles."""
    sizes = {"num_kv_heads": 4, "block_size": 16, "head_dim": 256}
    q, cache, _, *tables = attention_arrays(tpu, num_q_heads=16, **sizes)

    def attend(pages, q, *tables):
        return paged_attention(
            q, pages.reshape(cache.shape), 0, *tables, scale=0.1, target=tpu.target
        )

    program = tpu.compile(attend, raw_pages(tpu, BF16, **sizes), q, *tables)
    assert program.memory.temp_size_in_bytes >= array_bytes(cache)


@on_v6e
def test_a_narrow_head_would_copy_the_cache(tpu):
    """This is why `misfit` refuses it: XLA makes the blocks of such a cache the innermost axis."""
    arrays = attention_arrays(tpu, head_dim=64)
    rules = {**PLAIN_RULES, "sinks": None, "alibi_slopes": None}
    assert "head_dim 64" in attention_body.misfit(*arrays, **rules)
    body = functools.partial(attention_body.paged_attention_mosaic_tpu, **rules)
    assert tpu.compile(body, *arrays).buffers_of(NUM_ROWS * ROW_BYTES)


@on_v6e
def test_block_copy_needs_no_kernel_to_stay_in_place(tpu):
    pages = raw_pages(tpu, BF16, num_kv_heads=8, block_size=16, head_dim=128)
    ids = tpu.array((8,), jnp.int32)
    function = functools.partial(block_copy, target=tpu.target)
    program = tpu.compile(function, pages, ids, ids, donate_argnums=(0,))
    assert program.mosaic_kernels == []
    assert program.memory.alias_size_in_bytes == array_bytes(pages)
    # XLA's scatter updates its operand in place, which the program's text does not show. The sum of
    # temporary memory does.
    assert program.memory.temp_size_in_bytes < ROW_BYTES // 100
