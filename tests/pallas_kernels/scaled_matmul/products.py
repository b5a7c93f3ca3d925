"""What `scaled_matmul` must return, by its definition in float64 NumPy."""

import numpy as np

# Bodies may round each weight to the dtype of x.
TOLERANCES = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}


def assert_is_the_product(case, inputs, out, *, tolerance=None):
    assert (out.shape, out.dtype) == ((case.num_rows, case.out_features), np.float32)
    wanted_np = np.asarray(inputs.x).astype(np.float64) @ inputs.weights_np
    tolerance = TOLERANCES[case.dtype] if tolerance is None else tolerance
    np.testing.assert_allclose(out, wanted_np, atol=tolerance, rtol=tolerance)
