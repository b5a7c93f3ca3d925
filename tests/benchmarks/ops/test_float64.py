"""The float64 attention agrees with numbers by hand, and with itself in parts."""

import numpy as np
import pytest

from benchmarks.ops.float64 import SeenRule, attend, merge


def test_two_keys_are_weighted_by_their_logits() -> None:
    # Logits 0 and ln 3: weights 1/4 and 3/4 of the values 4 and 8; the denominator is 4. A sink of
    # logit ln 4 doubles the denominator.
    keys = np.array([0.0, np.log(3)]).reshape(2, 1, 1)
    values = np.array([4.0, 8.0]).reshape(2, 1, 1)
    for sinks, wanted, denominator in ((None, 7.0, 4), (np.array([np.log(4)]), 3.5, 8)):
        arrays = (np.full((1, 1, 1), 2.0), keys, values, np.array([1]))
        out, lse = attend(*arrays, SeenRule(scale=0.5), sinks)
        assert out.item() == pytest.approx(wanted)
        assert lse.item() == pytest.approx(np.log(denominator))


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
