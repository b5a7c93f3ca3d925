"""Tests of `mla_decode/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_decode.cases import CASES, build_inputs
from pallas_kernels.target import Target
from tests.quick_compile import quick_jit

SHAPES = {
    "q": ((6, 4, 48), jnp.float32),
    "kv_cache": ((2, 9, 1, 16, 48), jnp.float32),
    "row": ((), jnp.int32),
    "block_tables": ((3, 5), jnp.int32),
    "seq_lens": ((3,), jnp.int32),
    "query_start_loc": ((4,), jnp.int32),
}


def shapes_of_result(changes, **options):
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in (SHAPES | changes).items()}
    options = {"latent_dim": 32, "scale": 1.0} | options
    return jax.eval_shape(lambda arguments: mla_decode(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_output_and_lse(implementation):
    options = {"implementation": implementation}
    assert shapes_of_result({}, **options).shape == (6, 4, 32)
    out, lse = shapes_of_result({"q": ((6, 4, 48), jnp.bfloat16)}, return_lse=True, **options)
    assert (out.shape, out.dtype) == ((6, 4, 32), jnp.bfloat16)
    assert (lse.shape, lse.dtype) == ((6, 4), jnp.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_cache": ((2, 9, 2, 16, 48), jnp.float32)}, r"kv_cache .* got \[2, 9, 2, 16, 48\]"),
        ({"kv_cache": ((2, 9, 16, 48), jnp.float32)}, r"kv_cache .* got \[2, 9, 16, 48\]"),
        ({"q": ((6, 4, 32), jnp.float32)}, r"q has .* wanted \[num_tokens, num_q_heads, 48\]"),
        ({"seq_lens": ((4,), jnp.int32)}, r"seq_lens .* got \[4\], wanted \[3\]"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc .* got \[3\], wanted \[4\]"),
        ({"block_tables": ((3,), jnp.int32)}, r"block_tables .* got \[3\]"),
        ({"block_tables": ((3, 5), jnp.uint32)}, "block_tables .* got uint32, wanted int32"),
        ({"q": ((6, 4, 48), jnp.int32)}, "q has the wrong dtype: got int32"),
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
    ("latent_dim", "message"),
    [
        (0, "latent_dim is too small: got 0"),
        (49, "latent_dim is too large: got 49, .* 48"),
        (32.0, "latent_dim must be an integer: got 32.0"),
    ],
)
def test_a_latent_that_is_not_in_the_cache_is_refused(latent_dim, message):
    with pytest.raises(ValueError, match=message):
        shapes_of_result({}, latent_dim=latent_dim)


def test_a_static_row_outside_the_cache_is_refused():
    inputs = build_inputs(CASES[0])
    with pytest.raises(ValueError, match=r"row is out of range: got 2, wanted \[0, 2\)"):
        mla_decode(*inputs.arrays[:2], 2, *inputs.arrays[3:], **inputs.rules)


def test_a_new_body_is_chosen_by_the_target_and_says_what_it_cannot_do():
    target = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
    # A float32 cache is not for wgmma: XLA takes it on a GPU too, and by name it is refused.
    assert shapes_of_result({}, target=target).shape == (6, 4, 32)
    with pytest.raises(ValueError, match="mla_decode: the body 'mosaic_gpu' cannot do this call"):
        shapes_of_result({}, implementation="mosaic_gpu")


def test_tokens_to_verify_are_requests_of_their_own():
    # Tokens at positions 4 and 5 of one sequence, as two requests with the same blocks, see what
    # one after the other would.
    inputs = build_inputs(CASES[0])
    req_idx, seq_len = 2, 33
    table, q = np.asarray(inputs.block_tables)[req_idx], np.asarray(inputs.q)

    def attend(q, seq_lens):
        num_reqs = len(seq_lens)
        return quick_jit(mla_decode, **inputs.rules)(
            q,
            *(inputs.kv_cache, inputs.row, np.tile(table, (num_reqs, 1))),
            np.array(seq_lens, np.int32),
            np.arange(num_reqs + 1, dtype=np.int32),
        )

    together = attend(q[:2], [seq_len - 1, seq_len])
    apart = [np.asarray(attend(q[i : i + 1], [seq_len - 1 + i]))[0] for i in range(2)]
    np.testing.assert_allclose(together, np.stack(apart), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
@pytest.mark.parametrize(
    "sizes", [(0, 2, 3), (4, 0, 3), (4, 2, 0)], ids=["no tokens", "no requests", "no blocks"]
)
def test_where_there_is_nothing_to_see_the_result_says_so(implementation, sizes):
    num_tokens, num_reqs, max_blocks_per_req = sizes
    out, lse = mla_decode(
        *(jnp.ones((num_tokens, 4, 24)), jnp.full((1, 5, 1, 8, 24), jnp.nan), 0),
        jnp.zeros((num_reqs, max_blocks_per_req), jnp.int32),
        jnp.zeros(num_reqs, jnp.int32),
        jnp.zeros(num_reqs + 1, jnp.int32),
        latent_dim=16,
        scale=1.0,
        return_lse=True,
        implementation=implementation,
    )
    np.testing.assert_array_equal(out, np.zeros((num_tokens, 4, 16)))
    np.testing.assert_array_equal(lse, np.full((num_tokens, 4), -np.inf))
