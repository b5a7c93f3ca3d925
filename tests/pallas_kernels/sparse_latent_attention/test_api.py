"""Tests of `sparse_latent_attention`: the reference against NumPy, the XLA body against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NO_POSITION, latent_attention
from pallas_kernels.latent_attention.cases import CASES, LatentAttentionCase, build_inputs
from pallas_kernels.sparse_latent_attention.api import sparse_latent_attention
from tests.quick_compile import marked_sizes, quick_jit

_BY_NAME = {case.name: case for case in CASES}
LONG = LatentAttentionCase(name="long", requests=((1, 900), (40, 400)), block_size=8, rope_dim=0)
# A case with unused columns runs the code of one without them. A case of idle requests has padding.
SOME_CASES = marked_sizes(
    [
        _BY_NAME["empty_and_idle_requests"],
        _BY_NAME["mixed_with_unused_columns"],
        _BY_NAME["mixed_bfloat16_as_uint16"],
        LONG,
    ],
    slow=[_BY_NAME["mixed"], _BY_NAME["padding_only"]],
)
TOP_K = 300  # more than a tile of vectors
TOLERANCES = {"float32": 5e-6, "bfloat16": 2e-2}


def drawn_positions(inputs, *, top_k: int = TOP_K, share: float = 0.7) -> np.ndarray:
    """For each token some of the positions that it may see, in any order."""
    rng = np.random.default_rng(0)
    starts_np = np.asarray(inputs.query_start_loc)
    positions = np.full((inputs.q_latent.shape[0], top_k), NO_POSITION, np.int32)
    for req_idx, cached in enumerate(inputs.cached_np):
        start, end = starts_np[req_idx : req_idx + 2]
        for token in range(start, end if len(cached) else start):
            num_seen = len(cached) - (end - 1 - token)
            own = rng.permutation(num_seen)[: max(1, int(share * num_seen))][:top_k]
            positions[token, : len(own)] = own
    return positions


def attended_by_numpy(inputs, positions):
    q_np = inputs.q_np.astype(np.float64)
    latent_dim = inputs.q_latent.shape[-1]
    starts_np = np.asarray(inputs.query_start_loc)
    out = np.zeros((*q_np.shape[:2], latent_dim))
    for req_idx, cached in enumerate(inputs.cached_np):
        for token in range(*starts_np[req_idx : req_idx + 2]):
            chosen = cached[positions[token][positions[token] < len(cached)]].astype(np.float64)
            if len(chosen):
                weights = np.exp(inputs.rules["scale"] * q_np[token] @ chosen.T)
                out[token] = weights @ chosen[:, :latent_dim] / weights.sum(axis=1, keepdims=True)
    return out


def run(inputs, positions, **options):
    rules = {name: inputs.rules[name] for name in ("scale", "kv_dtype")}
    call = quick_jit(sparse_latent_attention, **rules, **options)
    arrays = (*inputs.arrays[:3], np.int32(inputs.row), *inputs.arrays[4:])
    return np.asarray(call(*arrays, positions)).astype(np.float32)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_tokens_attend_to_chosen_positions_alone(case, implementation):
    inputs = build_inputs(case)
    positions = drawn_positions(inputs)
    got = run(inputs, positions, implementation=implementation)
    tolerance = TOLERANCES[case.dtype]
    wanted = attended_by_numpy(inputs, positions)
    np.testing.assert_allclose(got, wanted, atol=tolerance, rtol=tolerance)


# In the normal run, NumPy says what chosen positions give.
@pytest.mark.slow
def test_attention_to_all_positions_is_latent_attention():
    inputs = build_inputs(_BY_NAME["mixed"])
    positions = drawn_positions(inputs, share=1.0)
    dense = quick_jit(latent_attention, scale=inputs.rules["scale"])
    arrays = (*inputs.arrays[:3], np.int32(inputs.row), *inputs.arrays[4:])
    np.testing.assert_allclose(run(inputs, positions), dense(*arrays), atol=5e-6, rtol=5e-6)


def test_bits_do_not_depend_on_the_batch_when_it_is_to_be_invariant():
    inputs = build_inputs(LatentAttentionCase(name="", requests=((9, 150), (1, 40), (20, 20))))
    positions = drawn_positions(inputs)
    call = quick_jit(sparse_latent_attention, scale=0.2, batch_invariant=True)
    q_latent, q_rope, kv_cache, _, tables, seq_lens, starts = inputs.arrays
    row = np.int32(inputs.row)
    together = call(q_latent, q_rope, kv_cache, row, tables, seq_lens, starts, positions)
    together_np = np.asarray(together)

    def alone(x):
        alone_np = np.zeros(x.shape, x.dtype)
        alone_np[:4] = np.asarray(x)[5:9]
        return alone_np

    own = (alone(q_latent), alone(q_rope), kv_cache, row, tables, seq_lens)
    starts = np.array([0, 4, 4, 4], np.int32)
    got = np.asarray(call(*own, starts, alone(positions)))
    np.testing.assert_array_equal(got[:4], together_np[5:9])
    np.testing.assert_array_equal(got[4:], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ((5, 4), jnp.int32)}, r"positions has .* got \[5, 4\], wanted \[6, top_k\]"),
        ({"positions": ((6, 4), jnp.float32)}, "positions .* got float32, wanted int32"),
        ({"q_rope": ((6, 4, 17), jnp.float32)}, "latent_dim .* = 49, wanted at most .* 48"),
        ({"q_rope": ((6, 4, 16), jnp.bfloat16)}, "one dtype: got float32 and bfloat16"),
        ({"kv_cache": ((2, 9, 2, 8, 48), jnp.float32)}, r"kv_cache .* got \[2, 9, 2, 8, 48\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    shapes = {
        "q_latent": ((6, 4, 32), jnp.float32),
        "q_rope": ((6, 4, 16), jnp.float32),
        "kv_cache": ((2, 9, 1, 8, 48), jnp.float32),
        "row": ((), jnp.int32),
        "block_tables": ((3, 5), jnp.int32),
        "seq_lens": ((3,), jnp.int32),
        "query_start_loc": ((4,), jnp.int32),
        "positions": ((6, 4), jnp.int32),
    }
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in (shapes | changes).items()}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arguments: sparse_latent_attention(**arguments, scale=1.0), arguments)
