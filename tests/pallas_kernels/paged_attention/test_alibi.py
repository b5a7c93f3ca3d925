"""Bodies in plain XLA add a bias of the distance; kernels refuse it by name."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Target, paged_attention
from pallas_kernels.dispatch import preferred_body
from pallas_kernels.paged_attention.alibi import ALIBI_MISFIT
from pallas_kernels.paged_attention.api import _BODIES
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from tests.quick_compile import quick_jit

MIXED = PagedAttentionCase(name="mixed", requests=((1, 40), (20, 70), (1, 1), (7, 7)))
DECODES = PagedAttentionCase(name="decodes", requests=((1, 40), (1, 17), (1, 1)))
# More query tokens, and longer distances, than a tile of query tokens has.
WINDOW = PagedAttentionCase(name="window", requests=((1, 60), (40, 70)), sliding_window=50)
SLOPES = np.array([0.5, 0.25, 0.0, 1.0], np.float32)


def dense(case: PagedAttentionCase, inputs) -> np.ndarray:
    """Attention of each request over its own keys, in float64."""
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
            logits += SLOPES[:, None] * (np.arange(start, position + 1) - position)
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
            (WINDOW, "reference", ()),
            (WINDOW, "xla", ()),
            (WINDOW, "batch_invariant", ()),
            (DECODES, "xla", ()),
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
def test_bias_is_the_slope_times_the_distance(body, case):
    inputs = build_inputs(case)
    chosen = {"implementation": body}
    if body == "batch_invariant":
        chosen = {"implementation": "xla", "batch_invariant": True}
    attend = quick_jit(paged_attention, **inputs.rules, **chosen)
    out = attend(*inputs.arrays, alibi_slopes=jnp.asarray(SLOPES))
    np.testing.assert_allclose(out, dense(case, inputs), rtol=2e-5, atol=2e-5)


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
    options = {**inputs.rules, **inputs.traced_options, "alibi_slopes": jnp.asarray(SLOPES)}
    assert preferred_body("paged_attention", _BODIES, target, *inputs.arrays, **options) == "xla"
    for name in (f"mosaic_{target.platform}", f"mosaic_{target.platform}_interpret"):
        assert _BODIES[name].misfit(*inputs.arrays, **options) == ALIBI_MISFIT
