"""Tests of `latent_attention/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.latent_attention.api import latent_attention
from pallas_kernels.latent_attention.cases import CASES, build_inputs
from pallas_kernels.target import Target
from tests import on_device

SHAPES = {
    "q_latent": ((6, 4, 32), jnp.float32),
    "q_rope": ((6, 4, 16), jnp.float32),
    "kv_cache": ((2, 9, 1, 16, 48), jnp.float32),
    "row": ((), jnp.int32),
    "block_tables": ((3, 5), jnp.int32),
    "seq_lens": ((3,), jnp.int32),
    "query_start_loc": ((4,), jnp.int32),
}


def shapes_of_result(changes, **options):
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in (SHAPES | changes).items()}
    options = {"scale": 1.0} | options
    return jax.eval_shape(lambda arguments: latent_attention(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_output_and_lse(implementation):
    options = {"implementation": implementation}
    assert shapes_of_result({}, **options).shape == (6, 4, 32)
    narrow = {
        "q_latent": ((6, 4, 32), jnp.bfloat16),
        "q_rope": ((6, 4, 8), jnp.bfloat16),
    }
    out, lse = shapes_of_result(narrow, return_lse=True, **options)
    assert (out.shape, out.dtype) == ((6, 4, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((6, 4), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": ((2, 9, 2, 16, 48), jnp.float32)}, r"kv_cache .* got \[2, 9, 2, 16, 48\]"),
        ({"kv_cache": ((2, 9, 16, 48), jnp.float32)}, r"kv_cache .* got \[2, 9, 16, 48\]"),
        ({"q_latent": ((6, 4), jnp.float32)}, r"q_latent has .* got \[6, 4\]"),
        ({"q_rope": ((6, 2, 16), jnp.float32)}, r"q_rope has .* wanted \[6, 4, rope_dim\]"),
        ({"q_rope": ((6, 4, 17), jnp.float32)}, "got latent_dim .* = 49, wanted at most .* 48"),
        ({"q_rope": ((6, 4, 16), jnp.bfloat16)}, "one dtype: got float32 and bfloat16"),
        ({"seq_lens": ((4,), jnp.int32)}, r"seq_lens .* got \[4\], wanted \[3\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc .* got \[3\], wanted \[4\]"),
        ({"block_tables": ((3,), jnp.int32)}, r"block_tables .* got \[3\]"),
        ({"block_tables": ((3, 5), jnp.uint32)}, "block_tables .* got uint32, wanted int32"),
        ({"q_latent": ((6, 4, 32), jnp.int32)}, "q_latent has the wrong dtype: got int32"),
        ({"kv_cache": ((2, 9, 1, 16, 48), jnp.int8)}, "kv_cache has the wrong dtype: got int8"),
        (
            {"kv_cache": ((2, 9, 1, 0, 48), jnp.float32)},
            r"kv_cache is empty: got \[2, 9, 1, 0, 48\]",
        ),
        ({"row": ((1,), jnp.int32)}, r"row must be one integer: got int32\[1\]"),
        (
            {"kv_cache": ((2, 9, 1, 16, 48), jnp.float8_e4m3fn)},
            "kv_cache .* got float8_e4m3fn, wanted a float of 16 bits or more",
        ),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_result(changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_query_len": 0}, "max_query_len is too small: got 0"),
        ({"scale": float("nan")}, "scale must be a finite number"),
        ({"kv_dtype": jnp.bfloat16}, "kv_dtype is only for a uint16 kv_cache"),
        (
            {"batch_invariant": True, "implementation": "reference"},
            "no such implementation: got 'reference'",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_result({}, **options)


def test_a_static_row_outside_the_cache_is_refused():
    inputs = build_inputs(CASES[0])
    with pytest.raises(ValueError, match=r"row is out of range: got 2, wanted \[0, 2\)"):
        latent_attention(*inputs.arrays[:3], 2, *inputs.arrays[4:], **inputs.rules)


def test_a_body_is_chosen_by_the_target_and_names_what_it_cannot_do():
    target = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    # wgmma does not multiply float32, so XLA computes the call, unless the body is named.
    assert shapes_of_result({}, target=target).shape == (6, 4, 32)
    with pytest.raises(
        ValueError, match="latent_attention: the body 'mosaic_gpu' cannot do this call"
    ):
        shapes_of_result({}, implementation="mosaic_gpu")


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=["no tokens", "no requests", "no blocks"]
)
def test_without_keys_the_output_is_zero_and_lse_is_minus_infinity(implementation, sizes):
    num_tokens, num_reqs, max_blocks_per_req = sizes
    out, lse = latent_attention(
        *(on_device.ones((num_tokens, 4, 16)), on_device.ones((num_tokens, 4, 8))),
        *(on_device.full((1, 5, 1, 8, 24), jnp.nan), 0),
        on_device.zeros((num_reqs, max_blocks_per_req), jnp.int32),
        on_device.zeros(num_reqs, jnp.int32),
        on_device.zeros(num_reqs + 1, jnp.int32),
        scale=1.0,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_array_equal(out, np.zeros((num_tokens, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((num_tokens, 4), -np.inf))
