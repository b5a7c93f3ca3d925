"""The float64 attention agrees with numbers by hand, and with the op's reference."""

import jax
import numpy as np
import pytest

from benchmarks.ops.float64 import SeenRule, attend, merge
from pallas_kernels import paged_attention
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs


def test_two_keys_are_weighted_by_their_logits() -> None:
    # Logits 0 and ln 3: weights 1/4 and 3/4 of the values 4 and 8; the denominator is 4.
    keys = np.array([0.0, np.log(3)]).reshape(2, 1, 1)
    values = np.array([4.0, 8.0]).reshape(2, 1, 1)
    rule = SeenRule(scale=0.5)
    out, lse = attend(np.full((1, 1, 1), 2.0), keys, values, np.array([1]), rule)
    assert out.item() == pytest.approx(7.0)
    assert lse.item() == pytest.approx(np.log(4))
    # A sink of logit ln 4 doubles the denominator.
    sinks = np.array([np.log(4)])
    out, lse = attend(np.full((1, 1, 1), 2.0), keys, values, np.array([1]), rule, sinks)
    assert out.item() == pytest.approx(3.5)
    assert lse.item() == pytest.approx(np.log(8))


@pytest.mark.parametrize(
    "rules",
    [
        {"sliding_window": 7, "soft_cap": 1.5},
        {"chunk_size": 8, "has_sinks": True},
        {"is_causal": False},
    ],
    ids=str,
)
def test_agrees_with_the_reference_of_the_op(rules: dict) -> None:
    case = PagedAttentionCase(
        name="one", requests=((5, 21),), num_padding_tokens=0, head_dim=16, **rules
    )
    inputs = build_inputs(case, seed=3)
    wanted, wanted_lse = jax.jit(
        lambda arrays, options: paged_attention(
            *arrays, **inputs.rules, **options, return_lse=True, implementation="reference"
        )
    )(inputs.arrays, inputs.traced_options)
    rule = SeenRule(**{k: v for k, v in inputs.rules.items() if k != "max_query_len"})
    sinks = None if inputs.sinks is None else np.asarray(inputs.sinks)
    out, lse = attend(
        np.asarray(inputs.q),
        *(inputs.keys_np[0], inputs.values_np[0], np.arange(16, 21), rule, sinks),
    )
    np.testing.assert_allclose(out, wanted, atol=1e-5)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5)


def test_merged_parts_are_the_whole() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, 2, 4)) for n in (3, 10, 10))
    rule = SeenRule(scale=0.5, is_causal=False)
    positions = np.arange(7, 10)
    parts = [attend(q, k[s], v[s], positions, rule) for s in (slice(4), slice(4, 10), slice(0))]
    outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
    outs[2] = np.nan  # of no keys: it must not reach the result
    out, lse = merge(outs, lses)
    whole = attend(q, k, v, positions, rule)
    np.testing.assert_allclose(out, whole[0])
    np.testing.assert_allclose(lse, whole[1])
