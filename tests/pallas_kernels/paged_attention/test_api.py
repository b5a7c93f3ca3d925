"""Tests of `paged_attention/api.py`: the checks of arguments and the choice of a body."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import kv_scatter, pad_slot, slot_mapping
from pallas_kernels.paged_attention.api import paged_attention
from tests import on_device
from tests.quick_compile import quick_jit

SHAPES = {
    "q": ((6, 4, 32), jnp.float32),
    "kv_cache": ((2, 10, 2, 16, 32), jnp.float32),
    "row": ((), jnp.int32),
    "block_tables": ((3, 2), jnp.int32),
    "seq_lens": ((3,), jnp.int32),
    "query_start_loc": ((4,), jnp.int32),
}


def shape_of_result(changes, **options):
    """The result's shape and dtype for the example arguments with some of them changed."""
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    options = {"scale": 1.0, **options}
    return jax.eval_shape(lambda arguments: paged_attention(**arguments, **options), arguments)


def test_result_has_the_shape_and_dtype_of_q():
    result = shape_of_result({"q": ((6, 4, 32), jnp.bfloat16)})
    assert result.shape == (6, 4, 32)
    assert result.dtype == jnp.bfloat16


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_gives_the_same_shapes(implementation):
    assert shape_of_result({}, implementation=implementation).shape == (6, 4, 32)
    out, lse = shape_of_result({}, implementation=implementation, return_lse=True)
    assert out.shape == (6, 4, 32)
    assert (lse.shape, lse.dtype) == ((6, 4), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"q": ((6, 4), jnp.float32)},
            r"q .* got \[6, 4\], wanted \[num_tokens, num_q_heads, 32\]",
        ),
        ({"q": ((6, 4, 64), jnp.float32)}, r"q .* got \[6, 4, 64\]"),
        ({"q": ((6, 3, 32), jnp.float32)}, r"heads: got 3, wanted a multiple of .*num_kv_heads=2"),
        ({"q": ((6, 4, 32), jnp.int32)}, "q has the wrong dtype: got int32, wanted a float"),
        ({"kv_cache": ((2, 10, 2, 16), jnp.float32)}, r"kv_cache .* got \[2, 10, 2, 16\]"),
        (
            {"kv_cache": ((2, 5, 2, 16, 32), jnp.float32)},
            r"kv_cache .* got \[2, 5, 2, 16, 32\], wanted 2 entries of its second axis per block",
        ),
        ({"row": ((1,), jnp.int32)}, r"row must be one integer: got int32\[1\]"),
        *(
            (
                {"kv_cache": ((2, 10, 2, 16, 32), dtype)},
                rf"kv_cache has the wrong dtype: got {dtype}, wanted a float of 16 bits or more",
            )
            for dtype in ("int8", "float8_e4m3fn", "float8_e5m2")
        ),
        ({"row": ((), jnp.float32)}, r"row must be one integer: got float32\[\]"),
        ({"block_tables": ((3,), jnp.int32)}, "block_tables has the wrong shape"),
        ({"block_tables": ((3, 2), jnp.uint32)}, "block_tables .* got uint32, wanted int32"),
        ({"seq_lens": ((4,), jnp.int32)}, r"seq_lens .* got \[4\], wanted \[3\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc .* got \[3\], wanted \[4\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result(changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sliding_window": 0}, "sliding_window is too small: got 0, wanted at least 1"),
        ({"chunk_size": 0}, "chunk_size is too small: got 0, wanted at least 1"),
        ({"max_query_len": 0}, "max_query_len is too small: got 0, wanted at least 1"),
        (
            {"sliding_window": 4, "chunk_size": 8},
            r"too many limits .* got {'sliding_window': 4, 'chunk_size': 8} .* wanted at most one",
        ),
        (
            {"sliding_window": 4, "is_causal": False},
            r"too many limits .* with is_causal=False, wanted .* none without",
        ),
        ({"chunk_size": 4, "is_causal": False}, r"too many limits .* got {'chunk_size': 4}"),
        ({"soft_cap": 0.0}, "soft_cap is out of range: got 0.0"),
        ({"soft_cap": float("inf")}, "soft_cap must be a finite number: got inf"),
        ({"scale": float("nan")}, "scale must be a finite number: got nan"),
        ({"sliding_window": 2**31}, "sliding_window is too large: got 2147483648"),
        ({"chunk_size": 4.0}, "chunk_size must be an integer: got 4.0"),
        ({"sinks": np.zeros(3, np.float32)}, r"sinks .* got \[3\], wanted \[4\]"),
        ({"sinks": np.zeros(4, np.int32)}, "sinks has the wrong dtype: got int32"),
        ({"implementation": "triton"}, "got 'triton', wanted None or one of .*'xla'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result({}, **options)


def test_a_kv_dtype_that_does_not_fit_is_refused():
    uint16 = {"kv_cache": ((2, 10, 2, 16, 32), jnp.uint16)}
    assert shape_of_result(uint16, kv_dtype=jnp.bfloat16).dtype == jnp.float32
    with pytest.raises(ValueError, match="paged_attention: a uint16 kv_cache needs kv_dtype"):
        shape_of_result(uint16)
    with pytest.raises(ValueError, match="got float32, wanted one of"):
        shape_of_result(uint16, kv_dtype=jnp.float32)
    with pytest.raises(ValueError, match="kv_dtype is only for a uint16 kv_cache: got bfloat16"):
        shape_of_result({}, kv_dtype=jnp.bfloat16)


@pytest.mark.parametrize("row", [-1, 2])
def test_a_static_row_outside_the_cache_is_refused(row):
    arguments = {name: on_device.zeros(*shape) for name, shape in SHAPES.items()} | {"row": row}
    with pytest.raises(ValueError, match=rf"row is out of range: got {row}, wanted \[0, 2\)"):
        paged_attention(**arguments, scale=1.0)


def test_signature_names_no_backend():
    parameters = list(inspect.signature(paged_attention).parameters)
    assert parameters == [
        *SHAPES,
        *("scale", "is_causal", "sliding_window", "chunk_size", "soft_cap", "sinks"),
        *("alibi_slopes", "distance_factors", "distance_profiles"),
        *("kv_dtype", "max_query_len", "key_limits", "return_lse"),
        *("batch_invariant", "implementation", "target"),
    ]


@pytest.mark.parametrize("num_query", [1, 2])
@pytest.mark.parametrize(
    "options", [{"implementation": "reference"}, {}, {"batch_invariant": True}], ids=str
)
def test_a_page_is_the_keys_of_a_block_and_then_its_values(options, num_query):
    # Blocks of 8 tokens, one KV head of width 1. Block 1 of row 1 has the keys 1 and the values 5.
    # All other pages hold NaN. If keys and values were swapped, the result would be 1.
    pages = np.full((2, 4, 2 * 8), np.nan, np.float32)
    pages[1, 1, :8], pages[1, 1, 8:] = 1, 5
    q = np.full((num_query, 1, 1), 2, np.float32)
    call = quick_jit(paged_attention, scale=0.5, is_causal=False, return_lse=True, **options)
    out, lse = call(
        *(q, pages.reshape(2, 8, 1, 8, 1), np.int32(1), np.array([[1]], np.int32)),
        *(np.array([8], np.int32), np.array([0, num_query], np.int32)),
    )
    np.testing.assert_allclose(out, np.full((num_query, 1, 1), 5), rtol=1e-6)
    # Eight keys, each with the logit 2 * 1 / 2.
    np.testing.assert_allclose(lse, np.full((num_query, 1), 1 + np.log(8)), rtol=1e-6)


def test_a_prompt_in_chunks_equals_the_prompt_at_once():
    num_blocks, block_size, head_dim, seq_len = 6, 16, 8, 40
    q, k, v = np.random.default_rng(0).standard_normal((3, seq_len, 2, head_dim), np.float32)
    padding = pad_slot(2, num_blocks, block_size)
    block_tables = on_device.array([[0, 0, 0], [5, 2, 3]], jnp.int32)

    def step(kv_cache, tokens, start, num_query):
        positions = start + on_device.arange(seq_len, dtype=jnp.int32)
        query_start_loc = jnp.stack([0 * num_query, 0 * num_query, num_query])
        slots = slot_mapping(
            *(positions[None], block_tables[None], query_start_loc),
            block_size=block_size,
            pad_slot=padding,
        )
        q, k, v = tokens
        kv_cache = kv_scatter(kv_cache, k, v, slots[0], 1)
        seq_lens = jnp.stack([0 * num_query, start + num_query])
        arguments = (q, kv_cache, 1, block_tables, seq_lens, query_start_loc)
        return kv_cache, paged_attention(*arguments, scale=0.5)

    logits = 0.5 * np.einsum("qhd,khd->hqk", q, k)
    weights = np.exp(np.where(np.tri(seq_len, dtype=bool), logits, -np.inf))
    expected = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), v)

    for chunks in ((40,), (24, 16), (17, 1, 21, 1), (1,) * 8 + (32,)):
        kv_cache = np.full((2, 2 * num_blocks, 2, block_size, head_dim), np.nan, np.float32)
        outputs, start = [], 0
        for num_query in chunks:
            tokens = [np.roll(x, -start, axis=0) for x in (q, k, v)]
            kv_cache, out = quick_jit(step)(kv_cache, tokens, np.int32(start), np.int32(num_query))
            outputs.append(np.asarray(out)[:num_query])
            start += num_query
        np.testing.assert_allclose(np.concatenate(outputs), expected, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=["no tokens", "no requests", "no blocks"]
)
def test_without_keys_the_output_is_zero_and_lse_is_minus_infinity(implementation, sizes):
    num_tokens, num_reqs, max_blocks_per_req = sizes
    cache = on_device.full((1, 10, 2, 8, 16), jnp.nan)
    out, lse = paged_attention(
        *(on_device.ones((num_tokens, 4, 16)), cache, 0),
        on_device.zeros((num_reqs, max_blocks_per_req), jnp.int32),
        on_device.zeros(num_reqs, jnp.int32),
        on_device.zeros(num_reqs + 1, jnp.int32),
        scale=1.0,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_array_equal(out, np.zeros((num_tokens, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((num_tokens, 4), -np.inf))


@pytest.mark.parametrize("num_query", [1, 2])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_logits_far_below_zero_are_no_masked_ones(num_query, batch_invariant):
    # Four keys have the logit -1e32. The length of the request leaves out the rest of the block.
    kv_cache = np.full((1, 2, 1, 8, 1), np.nan, np.float32)
    kv_cache[:, 0] = -1e16
    kv_cache[:, 1, :, :4] = 3.0
    q = np.full((num_query, 1, 1), 1e16, np.float32)
    options = {"scale": 1.0, "return_lse": True, "batch_invariant": batch_invariant}
    out, lse = quick_jit(paged_attention, **options)(
        *(q, kv_cache, 0, np.zeros((1, 1), np.int32)),
        *(np.array([4], np.int32), np.array([0, num_query], np.int32)),
    )
    np.testing.assert_array_equal(out, np.full((num_query, 1, 1), 3.0))
    np.testing.assert_allclose(lse, np.full((num_query, 1), -1e32), rtol=1e-6)


def test_an_empty_cache_is_refused():
    cache = on_device.zeros((1, 0, 2, 8, 16))
    indices = (
        on_device.zeros((1, 1), jnp.int32),
        on_device.ones(1, jnp.int32),
        on_device.zeros(2, jnp.int32),
    )
    with pytest.raises(ValueError, match=r"kv_cache is empty: got \[1, 0, 2, 8, 16\]"):
        paged_attention(on_device.ones((1, 4, 16)), cache, 0, *indices, scale=1.0)
