"""Bodies in plain XLA mix a bias from profiles of the distance; kernels refuse it by name."""

import numpy as np
import pytest

from pallas_kernels import Target, paged_attention
from pallas_kernels.dispatch import preferred_body
from pallas_kernels.paged_attention.api import _BODIES
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from pallas_kernels.paged_attention.distance_bias import DISTANCE_BIAS_MISFIT
from tests.quick_compile import quick_jit

MIXED = PagedAttentionCase(name="mixed", requests=((1, 40), (20, 70), (1, 1), (7, 7)))
DECODES = PagedAttentionCase(name="decodes", requests=((1, 40), (1, 17), (1, 1)))
# More query tokens than a tile has.
WINDOW = PagedAttentionCase(name="window", requests=((1, 40), (40, 70)), sliding_window=24)
NUM_PROFILES, NUM_DISTANCES = 3, 10


def draw_bias(case: PagedAttentionCase, num_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    factors_np = rng.standard_normal((num_tokens, case.num_q_heads, NUM_PROFILES))
    profiles_np = rng.standard_normal((NUM_PROFILES, NUM_DISTANCES))
    return factors_np.astype(np.float32), profiles_np.astype(np.float32)


def dense(case: PagedAttentionCase, inputs, factors_np, profiles_np) -> np.ndarray:
    """Attention of each request over its own keys, in float64, with a loop over distances."""
    q_np = np.asarray(inputs.q, np.float64)
    group = case.num_q_heads // case.num_kv_heads
    out_np = np.zeros(q_np.shape)
    token = 0
    for req_idx, (num_query, seq_len) in enumerate(case.requests):
        keys = np.repeat(inputs.keys_np[req_idx].astype(np.float64), group, axis=1)
        values = np.repeat(inputs.values_np[req_idx].astype(np.float64), group, axis=1)
        for position in range(seq_len - num_query, seq_len):
            start = max(0, position + 1 - (case.sliding_window or seq_len))
            seen = slice(start, position + 1)
            logits = np.einsum("hd,khd->hk", q_np[token], keys[seen]) * case.head_dim**-0.5
            for distance in range(min(NUM_DISTANCES, position + 1 - start)):
                bias = factors_np[token].astype(np.float64) @ profiles_np[:, distance]
                logits[:, position - distance - start] += bias
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            out_np[token] = np.einsum("hk,khd->hd", weights, values[seen])
            token += 1
    return out_np


@pytest.mark.parametrize(
    ("case", "body"),
    [
        pytest.param(case, body, id=f"{case.name}-{body}", marks=marks)
        for case, body, marks in (
            (DECODES, "xla", ()),
            (WINDOW, "reference", ()),
            (WINDOW, "xla", ()),
            (WINDOW, "batch_invariant", ()),
            # A mixed batch runs no code that a window does not run. Only `xla` has a path of its
            # own for decodes.
            (MIXED, "reference", pytest.mark.slow),
            (MIXED, "xla", pytest.mark.slow),
            (MIXED, "batch_invariant", pytest.mark.slow),
            (DECODES, "reference", pytest.mark.slow),
            (DECODES, "batch_invariant", pytest.mark.slow),
        )
    ],
)
def test_each_query_mixes_the_biases_of_distances(body, case):
    inputs = build_inputs(case)
    factors_np, profiles_np = draw_bias(case, inputs.q.shape[0])
    chosen = {"implementation": body}
    if body == "batch_invariant":
        chosen = {"implementation": "xla", "batch_invariant": True}
    attend = quick_jit(paged_attention, **inputs.rules, **chosen)
    out = attend(*inputs.arrays, distance_factors=factors_np, distance_profiles=profiles_np)
    expected = dense(case, inputs, factors_np, profiles_np)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-5)


def test_decodes_that_share_blocks_mix_biases_of_their_own():
    # Nine equal sequences in one list of blocks: the body for shared prefixes computes them.
    one = PagedAttentionCase(name="one", requests=((1, 40),), num_padding_tokens=8)
    inputs = build_inputs(one)
    factors_np, profiles_np = draw_bias(one, 9)
    nine = (
        *(inputs.q, inputs.kv_cache, inputs.row, np.tile(inputs.block_tables, (9, 1))),
        *(np.tile(inputs.seq_lens, 9), np.arange(10, dtype=np.int32)),
    )
    bias = {"distance_factors": factors_np, "distance_profiles": profiles_np}
    shared, reference = (
        quick_jit(paged_attention, **inputs.rules, implementation=body)(*nine, **bias)
        for body in ("xla", "reference")
    )
    np.testing.assert_allclose(shared, reference, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    "target",
    [
        Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0"),
        Target(platform="tpu", device_kind="TPU v6 lite"),
    ],
    ids=lambda target: target.platform,
)
def test_kernels_are_not_chosen(target):
    inputs = build_inputs(MIXED)
    factors_np, profiles_np = draw_bias(MIXED, inputs.q.shape[0])
    bias = {"distance_factors": factors_np, "distance_profiles": profiles_np}
    options = {**inputs.rules, **inputs.traced_options, **bias}
    assert preferred_body("paged_attention", _BODIES, target, *inputs.arrays, **options) == "xla"
    for name in (f"mosaic_{target.platform}", f"mosaic_{target.platform}_interpret"):
        assert _BODIES[name].misfit(*inputs.arrays, **options) == DISTANCE_BIAS_MISFIT


def test_arguments_that_do_not_fit_are_refused():
    inputs = build_inputs(DECODES)
    factors_np, profiles_np = draw_bias(DECODES, inputs.q.shape[0])
    rules = {**inputs.rules, "distance_factors": factors_np}
    with pytest.raises(ValueError, match="distance_factors need distance_profiles; got None"):
        paged_attention(*inputs.arrays, **rules)
    with pytest.raises(ValueError, match="distance_factors has the wrong shape"):
        paged_attention(*inputs.arrays, **rules, distance_profiles=profiles_np[1:])
    with pytest.raises(ValueError, match="got key_limits and distance_factors"):
        paged_attention(
            *inputs.arrays,
            **rules,
            distance_profiles=profiles_np,
            key_limits=np.zeros(inputs.q.shape[0], np.int32),
        )
