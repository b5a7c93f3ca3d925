"""What `grouped_matmul` must return, by its definition in float64 NumPy."""

import jax
import numpy as np

TOLERANCES = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 2e-2}


def assert_is_the_product(case, inputs, out):
    assert (out.shape, out.dtype) == ((inputs.x.shape[0], case.out_features), case.dtype)
    out_np = np.asarray(out).astype(np.float64)
    weights = inputs.weights
    if inputs.weights_dtype is not None:
        weights = jax.lax.bitcast_convert_type(weights, inputs.weights_dtype)
    weights_np = np.asarray(weights).astype(np.float64)
    rows_np = np.asarray(inputs.rows).astype(np.float64)
    places_np, group_ids_np = np.asarray(inputs.tiles.places), np.asarray(inputs.group_ids)
    tolerance = TOLERANCES[case.dtype]
    for row, (place, group_id) in enumerate(zip(places_np, group_ids_np, strict=True)):
        if group_id < len(weights_np):
            wanted = rows_np[row] @ weights_np[group_id]
            np.testing.assert_allclose(out_np[place], wanted, atol=tolerance, rtol=tolerance)
