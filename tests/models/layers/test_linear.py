"""Matrix products keep float32 sums, and the tied head equals the transposed copy."""

import jax.numpy as jnp
import numpy as np

from models.layers.linear import Embedding, Linear, dot_float32


def test_linear_is_x_times_kernel_plus_bias():
    linear = Linear(2, 3, use_bias=True, dtype=jnp.float32)
    linear.kernel[...] = jnp.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    linear.bias[...] = jnp.array([100.0, 0.0, 0.0])
    assert linear(jnp.array([[1.0, 2.0]])).tolist() == [[121.0, 42.0, 63.0]]


def test_linear_without_bias_has_none():
    assert Linear(2, 3, use_bias=False, dtype=jnp.float32).bias is None


def test_bfloat16_products_are_summed_in_float32():
    # In bfloat16, 256 + 1 is 256: a sum in that dtype would never pass 256.
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    assert dot_float32(ones, jnp.ones((4096, 1), jnp.bfloat16)).tolist() == [[4096.0]]
    out = Linear(4096, 1, use_bias=False, dtype=jnp.bfloat16)(ones)
    assert out.dtype == jnp.bfloat16


def test_tied_head_scores_tokens_with_their_embeddings():
    embedding = Embedding(3, 2, dtype=jnp.float32)
    embedding.embedding[...] = jnp.array([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    assert embedding(jnp.array([2, 0])).tolist() == [[2.0, 3.0], [1.0, 0.0]]
    scores = embedding.attend(jnp.array([[1.0, 10.0]]))
    np.testing.assert_array_equal(scores, [[1.0, 10.0, 32.0]])


def test_embedding_scale_is_rounded_to_the_tables_dtype_and_not_in_the_head():
    # sqrt(3072) is 55.43; bfloat16 has 55.25 and 55.5 around it.
    for dtype, scale in ((jnp.float32, 3072**0.5), (jnp.bfloat16, 55.5)):
        embedding = Embedding(2, 1, dtype=dtype, scale=3072**0.5)
        embedding.embedding[...] = jnp.array([[0.0], [2.0]], dtype)
        np.testing.assert_array_equal(
            embedding(jnp.array([1]))[0, 0], jnp.asarray(2 * scale, dtype)
        )
        assert embedding.attend(jnp.ones((1, 1), dtype)).tolist() == [[0.0, 2.0]]
