"""Tests of `sparse_paged_attention`: the reference against NumPy, the XLA body against both."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import NO_POSITION
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from pallas_kernels.sparse_paged_attention.api import sparse_paged_attention
from tests.quick_compile import quick_jit

QUICK_CASES = [
    PagedAttentionCase(name="mixed", requests=((5, 20), (1, 33), (0, 7), (3, 3))),
    PagedAttentionCase(name="padding", requests=((0, 0), (0, 5))),
    PagedAttentionCase(
        name="uint16", requests=((4, 30), (1, 9)), cache_dtype="bfloat16", is_uint16=True
    ),
    PagedAttentionCase(
        name="long", requests=((1, 900), (40, 400)), block_size=8, num_kv_heads=1, head_dim=16
    ),
]
NUM_POSITIONS = 300  # more than a tile of keys


def drawn_positions(inputs, share: float = 0.7) -> np.ndarray:
    """For each token some of the positions that it may see, in any order, with gaps between."""
    rng = np.random.default_rng(0)
    starts_np = np.asarray(inputs.query_start_loc)
    positions = np.full((inputs.q.shape[0], NUM_POSITIONS), NO_POSITION, np.int32)
    for req_idx, keys_np in enumerate(inputs.keys_np):
        start, end = starts_np[req_idx : req_idx + 2]
        for token in range(start, end if len(keys_np) else start):
            num_seen = len(keys_np) - (end - 1 - token)
            own = rng.permutation(num_seen)[: max(1, int(share * num_seen))][:NUM_POSITIONS]
            positions[token, rng.permutation(NUM_POSITIONS)[: len(own)]] = own
    return positions


def attended_by_numpy(inputs, positions):
    q_np = np.asarray(inputs.q, np.float64)
    starts_np = np.asarray(inputs.query_start_loc)
    out = np.zeros(q_np.shape)
    for req_idx, (keys_np, values_np) in enumerate(
        zip(inputs.keys_np, inputs.values_np, strict=True)
    ):
        heads_per_key = q_np.shape[1] // keys_np.shape[1]
        for token in range(*starts_np[req_idx : req_idx + 2]):
            own = positions[token][positions[token] < len(keys_np)]
            for head in range(q_np.shape[1] if len(own) else 0):
                keys, values = (x[own, head // heads_per_key] for x in (keys_np, values_np))
                weights = np.exp(
                    inputs.rules["scale"] * keys.astype(np.float64) @ q_np[token, head]
                )
                out[token, head] = weights @ values / weights.sum()
    return out


def run(inputs, positions, **options):
    rules = {name: inputs.rules[name] for name in ("scale", "kv_dtype")}
    call = quick_jit(sparse_paged_attention, **rules, **options)
    arrays = (inputs.q, inputs.kv_cache, np.int32(inputs.row), inputs.block_tables)
    arrays = (*arrays, inputs.seq_lens, inputs.query_start_loc, positions)
    return np.asarray(call(*arrays)).astype(np.float32)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", QUICK_CASES, ids=lambda case: case.name)
def test_tokens_attend_to_chosen_positions_alone(case, implementation):
    inputs = build_inputs(case)
    positions = drawn_positions(inputs)
    got = run(inputs, positions, implementation=implementation)
    np.testing.assert_allclose(got, attended_by_numpy(inputs, positions), atol=5e-6, rtol=5e-6)


def test_bits_do_not_depend_on_the_batch_when_it_is_to_be_invariant():
    inputs = build_inputs(PagedAttentionCase(name="", requests=((9, 150), (1, 40), (20, 20))))
    positions = drawn_positions(inputs)
    call = quick_jit(sparse_paged_attention, scale=0.2, batch_invariant=True)
    rest = (inputs.kv_cache, np.int32(inputs.row), inputs.block_tables, inputs.seq_lens)
    together_np = np.asarray(call(inputs.q, *rest, inputs.query_start_loc, positions))

    def alone(x):
        alone_np = np.zeros(x.shape, x.dtype)
        alone_np[:4] = np.asarray(x)[5:9]
        return alone_np

    starts = np.array([0, 4, 4, 4], np.int32)
    got = np.asarray(call(alone(inputs.q), *rest, starts, alone(positions)))
    np.testing.assert_array_equal(got[:4], together_np[5:9])
    np.testing.assert_array_equal(got[4:], 0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ((5, 4), jnp.int32)}, r"positions has .* got \[5, 4\], wanted \[6, num_pos"),
        ({"positions": ((6, 4), jnp.float32)}, "positions .* got float32, wanted int32"),
        ({"q": ((6, 4, 16), jnp.float32)}, r"q has .* got \[6, 4, 16\], wanted .* 32\]"),
        ({"q": ((6, 3, 32), jnp.float32)}, "got 3 query heads, wanted a multiple of 2"),
        ({"kv_cache": ((2, 9, 2, 8, 32), jnp.float32)}, r"kv_cache .* got \[2, 9, 2, 8, 32\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    shapes = {
        "q": ((6, 4, 32), jnp.float32),
        "kv_cache": ((2, 18, 2, 8, 32), jnp.float32),
        "row": ((), jnp.int32),
        "block_tables": ((3, 5), jnp.int32),
        "seq_lens": ((3,), jnp.int32),
        "query_start_loc": ((4,), jnp.int32),
        "positions": ((6, 4), jnp.int32),
    }
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in (shapes | changes).items()}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arguments: sparse_paged_attention(**arguments, scale=1.0), arguments)
