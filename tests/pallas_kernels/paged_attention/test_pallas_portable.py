"""Tests of `paged_attention/pallas_portable.py` against the reference."""

import numpy as np
import pytest

from pallas_kernels.paged_attention.cases import CASES, build_inputs
from pallas_kernels.paged_attention.pallas_portable import paged_attention_pallas

TOLERANCES = {"float32": 5e-6, "float16": 2e-3, "bfloat16": 2e-2}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, attend, attend_by_reference):
    out = attend(build_inputs(case), paged_attention_pallas)
    tolerance = TOLERANCES[case.dtype]
    np.testing.assert_allclose(out, attend_by_reference(case), atol=tolerance, rtol=tolerance)
