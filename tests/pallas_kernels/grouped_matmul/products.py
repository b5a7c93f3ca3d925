"""What `grouped_matmul` must return, by its definition in float64 NumPy."""

import numpy as np

from pallas_kernels.grouped_matmul.cases import CASES
from tests.quick_compile import slow_unless_named

TOLERANCES = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}
# The other cases have sizes of a GPU's tiles. In plain JAX, these are sizes like any others.
QUICK_CASES = (
    "one_row",
    "one_row_a_tile",
    "part_tiles",
    "unrouted",
    "all_unrouted",
    "one_group_has_all",
    "odd_widths",
    "bfloat16",
    "bfloat16_as_bits",
    "float16_as_bits",
)
MARKED_CASES = slow_unless_named(CASES, *QUICK_CASES)


def assert_is_the_product(case, inputs, out):
    assert (out.shape, out.dtype) == ((inputs.x.shape[0], case.out_features), case.dtype)
    out_np = np.asarray(out).astype(np.float64)
    weights_np = np.asarray(inputs.weights)
    if inputs.weights_dtype is not None:
        weights_np = weights_np.view(inputs.weights_dtype)
    weights_np = weights_np.astype(np.float64)
    rows_np = np.asarray(inputs.rows).astype(np.float64)
    places_np, group_ids_np = np.asarray(inputs.tiles.places), np.asarray(inputs.group_ids)
    tolerance = TOLERANCES[case.dtype]
    for row, (place, group_id) in enumerate(zip(places_np, group_ids_np, strict=True)):
        if group_id < len(weights_np):
            wanted = rows_np[row] @ weights_np[group_id]
            np.testing.assert_allclose(out_np[place], wanted, atol=tolerance, rtol=tolerance)
