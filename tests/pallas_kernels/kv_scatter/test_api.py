"""Tests of `kv_scatter/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_scatter.api import kv_scatter
from pallas_kernels.kv_scatter.cases import UINT16_CASES, build_inputs
from tests.quick_compile import quick_jit

SHAPES = {
    "kv_cache": ((2, 10, 2, 16, 32), jnp.float32),
    "k": ((6, 2, 32), jnp.float32),
    "v": ((6, 2, 32), jnp.float32),
    "slots": ((6,), jnp.int32),
    "row": ((), jnp.int32),
}


def shape_of_result(changes, **options):
    """The result's shape for the example arguments, some of them changed; None is no array."""
    arguments = {
        name: shape and jax.ShapeDtypeStruct(*shape) for name, shape in (SHAPES | changes).items()
    }
    return jax.eval_shape(lambda arguments: kv_scatter(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_the_cache(implementation):
    for changes in ({}, {"v": None}, {"v": None, "kv_cache": ((2, 5, 2, 16, 32), jnp.float32)}):
        kv_cache = shape_of_result(changes, implementation=implementation)
        assert (kv_cache.shape, kv_cache.dtype) == (SHAPES | changes)["kv_cache"]


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_nothing_to_do_is_no_error(implementation):
    changes = {
        "k": ((0, 2, 32), jnp.float32),
        "v": ((0, 2, 32), jnp.float32),
        "slots": ((0,), jnp.int32),
    }
    kv_cache = shape_of_result(changes, implementation=implementation)
    assert (kv_cache.shape, kv_cache.dtype) == SHAPES["kv_cache"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"kv_cache": ((10, 2, 16, 32), jnp.float32)},
            r"kv_cache .* got \[10, 2, 16, 32\], wanted \[num_rows, 2 \* num_blocks, num_kv_heads",
        ),
        (
            {"kv_cache": ((2, 5, 2, 16, 32), jnp.float32)},
            r"kv_cache .* got \[2, 5, 2, 16, 32\], wanted 2 entries of its second axis per block",
        ),
        (
            {"kv_cache": ((5, 2, 16, 32), jnp.float32), "v": None},
            r"kv_cache .* wanted \[num_rows, num_blocks, num_kv_heads",
        ),
        *(
            (
                {"kv_cache": ((2, 10, 2, 16, 32), dtype)},
                rf"kv_cache has the wrong dtype: got {dtype}, wanted a float of 16 bits or more",
            )
            for dtype in ("int8", "float8_e4m3fn", "int32")
        ),
        ({"k": ((6, 4, 32), jnp.float32)}, r"k has .* got \[6, 4, 32\], wanted \[6, 2, 32\]"),
        ({"v": ((6, 2, 8), jnp.float32)}, r"v has .* got \[6, 2, 8\], wanted \[6, 2, 32\]"),
        ({"k": ((6, 2, 32), jnp.int32)}, "k has the wrong dtype: got int32, wanted a float"),
        ({"slots": ((7,), jnp.int32)}, r"k has .* wanted \[7, 2, 32\]"),
        ({"slots": ((6, 1), jnp.int32)}, r"slots .* got \[6, 1\], wanted \[num_tokens\]"),
        ({"slots": ((6,), jnp.uint32)}, "slots has the wrong dtype: got uint32, wanted int32"),
        ({"row": ((2,), jnp.int32)}, r"row must be one integer: got int32\[2\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result(changes)


def test_a_static_row_outside_the_cache_is_refused():
    arguments = {name: jnp.zeros(*shape) for name, shape in SHAPES.items()} | {"row": 2}
    with pytest.raises(ValueError, match=r"row is out of range: got 2, wanted \[0, 2\)"):
        kv_scatter(**arguments)


def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="got 'cuda', wanted None or one of"):
        shape_of_result({}, implementation="cuda")


def test_values_are_cast_to_the_dtype_of_the_cache():
    cache = np.zeros((1, 4, 1, 8, 4), np.float16)
    token = np.full((1, 1, 4), 1.5, np.float32)
    slots = np.array([9], np.int32)
    kv_cache = np.asarray(quick_jit(kv_scatter)(cache, token, 2 * token, slots, 0))
    assert kv_cache.dtype == np.float16
    assert kv_cache[0, 2:, 0, 1].tolist() == [[1.5] * 4, [3.0] * 4]


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_page_is_the_keys_of_a_block_and_then_its_values(implementation):
    # 2 rows of 3 blocks of 4 tokens, 2 KV heads of 5. Slots 4 to 7 are those of block 1.
    pages = np.zeros((2, 3, 2 * 2 * 4 * 5), np.float32)
    token = np.ones((4, 2, 5), np.float32)
    kv_cache = quick_jit(kv_scatter, implementation=implementation)(
        *(pages.reshape(2, 6, 2, 4, 5), 3 * token, 7 * token, np.arange(4, 8, dtype=np.int32), 1)
    )
    pages = pages.copy()
    pages[1, 1, :40], pages[1, 1, 40:] = 3, 7
    np.testing.assert_array_equal(np.asarray(kv_cache).reshape(pages.shape), pages)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", UINT16_CASES, ids=lambda case: case.name)
def test_a_cache_of_uint16_holds_the_bits_of_kv_dtype(case, implementation):
    inputs = build_inputs(case)
    call = quick_jit(kv_scatter, kv_dtype=inputs.kv_dtype, implementation=implementation)
    # Rounded to kv_dtype, from which float32 differs in almost every number.
    k, v = (
        None if part is None else np.asarray(part, np.float32) * np.float32(1.001)
        for part in (inputs.k, inputs.v)
    )
    got = np.asarray(call(inputs.kv_cache, k, v, inputs.slots, inputs.row))
    expected = np.asarray(inputs.kv_cache).copy()
    parts = [np.asarray(part) for part in (k, v) if part is not None]
    for token_idx, slot in enumerate(np.asarray(inputs.slots)):
        if slot < case.num_blocks * case.block_size:
            block, offset = divmod(slot, case.block_size)
            for part_idx, part in enumerate(parts):
                bits = part[token_idx].astype(inputs.kv_dtype).view(np.uint16)
                expected[case.row, len(parts) * block + part_idx, :, offset] = bits
    assert got.dtype == np.uint16
    np.testing.assert_array_equal(got, expected)


def test_a_kv_dtype_that_does_not_fit_is_refused():
    uint16 = {"kv_cache": (SHAPES["kv_cache"][0], jnp.uint16)}
    with pytest.raises(ValueError, match="kv_scatter: a uint16 kv_cache needs kv_dtype"):
        shape_of_result(uint16)
    with pytest.raises(ValueError, match="kv_scatter: kv_dtype is only for a uint16 kv_cache"):
        shape_of_result({}, kv_dtype=jnp.float16)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_default_body_lowers_for_accelerators(platform):
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in SHAPES.items()}
    jitted = jax.jit(kv_scatter, donate_argnames="kv_cache")
    exported = jax.export.export(jitted, platforms=[platform])(**arguments)
    assert exported.platforms == (platform,)
