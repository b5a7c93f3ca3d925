"""Tests of `ragged_requests.py`: which request a token belongs to."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_requests import request_of_token


def test_tokens_of_no_request_get_the_last():
    starts = jnp.array([0, 2, 2, 5], jnp.int32)
    np.testing.assert_array_equal(request_of_token(starts, 7), [0, 0, 2, 2, 2, 2, 2])
