"""Tests of `dispatch.py`."""

import pytest

from pallas_kernels.dispatch import IMPLEMENTATIONS, select_body

BODIES = {"reference": "slow", "xla": "fast"}


def test_none_is_the_plain_jax_body():
    assert select_body("op", BODIES, None) == "fast"


def test_a_name_selects_its_body():
    assert select_body("op", BODIES, "reference") == "slow"


def test_an_unknown_name_is_refused_with_the_allowed_ones():
    with pytest.raises(ValueError, match=r"op .* got 'triton', .* \['reference', 'xla'\]"):
        select_body("op", BODIES, "triton")


def test_implementations_are_named():
    assert IMPLEMENTATIONS == ("reference", "xla", "pallas_interpret")
