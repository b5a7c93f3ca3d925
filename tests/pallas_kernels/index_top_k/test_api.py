"""Tests of `index_top_k`: the reference against NumPy, the XLA body against the reference.

Queries, keys and weights are small integers, so that scores are exact and many of them are equal.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_top_k.api import NO_POSITION, index_top_k
from pallas_kernels.latent_attention.cases import CASES, LatentAttentionCase, build_inputs
from tests.quick_compile import marked_sizes, quick_jit

_BY_NAME = {case.name: case for case in CASES}
MIXED = _BY_NAME["mixed"]
# Several tiles of keys, and a part of one.
LONG = LatentAttentionCase(name="long", requests=((1, 1500), (40, 700), (0, 3)), block_size=8)
SOME_CASES = marked_sizes(
    [_BY_NAME["empty_and_idle_requests"], _BY_NAME["mixed_bfloat16_as_uint16"], LONG],
    slow=[MIXED, _BY_NAME["padding_only"]],
)


def integers(case: LatentAttentionCase, seed: int = 0):
    """The arguments of the op, and the keys of each request: integers from -2 to 2."""
    inputs = build_inputs(dataclasses.replace(case, dtype="float32", is_uint16=False), seed)
    rng = np.random.default_rng(seed)
    q_np = np.concatenate([inputs.q_latent, inputs.q_rope], axis=-1).round().clip(-2, 2)
    keys_np = np.asarray(inputs.kv_cache).round().clip(-2, 2)  # NaN stays
    weights_np = rng.integers(-2, 3, q_np.shape[:2]).astype(np.float32)
    cached_np = [cached.round().clip(-2, 2) for cached in inputs.cached_np]
    return (q_np, weights_np, keys_np, *inputs.arrays[3:]), cached_np


def chosen_by_numpy(arguments, cached_np, top_k, key_step=1):
    q_np, weights_np, starts_np = (np.asarray(arguments[idx]) for idx in (0, 1, 6))
    wanted = np.full((len(q_np), top_k), NO_POSITION)
    for req_idx, cached in enumerate(cached_np):
        start, end = starts_np[req_idx : req_idx + 2]
        for token in range(start, end if len(cached) else start):
            seen = cached[: len(cached) - (end - 1 - token)]
            scores = weights_np[token] @ np.maximum(q_np[token] @ seen.T, 0)
            scores = scores[key_step - 1 :: key_step]
            best = np.argsort(-scores, kind="stable")[:top_k]
            wanted[token, : len(best)] = best * key_step + key_step - 1
    return wanted


def run(arguments, **options):
    row = np.int32(arguments[3])
    call = quick_jit(index_top_k, **options)
    return np.asarray(call(*arguments[:3], row, *arguments[4:]))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
@pytest.mark.parametrize("case", SOME_CASES, ids=lambda case: case.name)
def test_the_best_tokens_are_chosen_and_earlier_ones_of_equals(case, implementation):
    arguments, cached_np = integers(case)
    kv_dtype = None
    if case.is_uint16:
        kv_dtype = jnp.dtype(case.dtype)
        bits_np = arguments[2].astype(kv_dtype).view(np.uint16)
        arguments = (*arguments[:2], bits_np, *arguments[3:])
    options = {"top_k": 16, "kv_dtype": kv_dtype, "implementation": implementation}
    got = run(arguments, **options)
    np.testing.assert_array_equal(got, chosen_by_numpy(arguments, cached_np, 16))


# Blocks of 8 and of 16 tokens hold whole steps of 4, and no whole steps of 3.
@pytest.mark.parametrize(
    ("case", "implementation", "key_step"),
    [
        pytest.param(
            case,
            implementation,
            key_step,
            id=f"{case.name}-{implementation}-{key_step}",
            marks=() if is_normal else pytest.mark.slow,
        )
        for case, implementation, key_step, is_normal in (
            (MIXED, "reference", 3, True),
            (MIXED, "reference", 4, False),
            (MIXED, "xla", 3, False),
            (MIXED, "xla", 4, True),
            (LONG, "reference", 3, False),
            (LONG, "reference", 4, False),
            (LONG, "xla", 3, True),
            (LONG, "xla", 4, False),
        )
    ],
)
def test_only_positions_with_keys_are_chosen(case, implementation, key_step):
    arguments, cached_np = integers(case)
    got = run(arguments, top_k=16, key_step=key_step, implementation=implementation)
    np.testing.assert_array_equal(got, chosen_by_numpy(arguments, cached_np, 16, key_step))


def test_all_tokens_are_chosen_if_there_are_fewer():
    arguments, cached_np = integers(MIXED)
    got = run(arguments, top_k=2000)
    np.testing.assert_array_equal(got, chosen_by_numpy(arguments, cached_np, 2000))


def test_a_choice_does_not_depend_on_the_batch():
    """The same token in a batch of other requests, with scores that are not exact."""
    inputs = build_inputs(LatentAttentionCase(name="", requests=((9, 150), (1, 40), (20, 20))))
    q = np.concatenate([inputs.q_latent, inputs.q_rope], axis=-1)
    weights = np.random.default_rng(0).standard_normal(q.shape[:2]).astype(np.float32)
    rest = inputs.arrays[2:]
    together = run((q, weights, *rest), top_k=16, batch_invariant=True)

    def alone(x):
        alone_np = np.zeros_like(x)
        alone_np[:4] = x[5:9]
        return alone_np

    starts = np.array([0, 4, 4, 4], np.int32)
    own = (alone(q), alone(weights), *rest[:-1], starts)
    got = run(own, top_k=16, batch_invariant=True)
    np.testing.assert_array_equal(got[:4], together[5:9])
    assert (got[4:] == NO_POSITION).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": ((6, 4), jnp.float32)}, r"q has .* got \[6, 4\]"),
        ({"weights": ((6, 3), jnp.float32)}, r"weights has .* got \[6, 3\], wanted \[6, 4\]"),
        ({"q": ((6, 4, 17), jnp.float32)}, "key_dim = 17, wanted at most .* 16"),
        ({"key_cache": ((2, 9, 2, 8, 16), jnp.float32)}, r"key_cache .* got \[2, 9, 2, 8, 16\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    shapes = {
        "q": ((6, 4, 16), jnp.float32),
        "weights": ((6, 4), jnp.float32),
        "key_cache": ((2, 9, 1, 8, 16), jnp.float32),
        "row": ((), jnp.int32),
        "block_tables": ((3, 5), jnp.int32),
        "seq_lens": ((3,), jnp.int32),
        "query_start_loc": ((4,), jnp.int32),
    }
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in (shapes | changes).items()}
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arguments: index_top_k(**arguments, top_k=4), arguments)
