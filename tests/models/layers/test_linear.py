"""Matrix products keep float32 sums, and the tied head equals the transposed copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.layers.linear import Embedding, Linear, dot_float32
from tests.quick_compile import quick_jit


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


def looped_linear(
    dtype: str = "float32",
    *,
    in_features: int = 16,
    num_panels: int = 1,
    max_looped_tokens: int = 4,
) -> Linear:
    """One with random numbers, which multiplies 2 to 4 tokens in a loop."""
    rng = np.random.default_rng(0)
    linear = Linear(in_features, 24, use_bias=True, dtype=jnp.dtype(dtype))
    kernel = rng.standard_normal((in_features, 24)).astype(jnp.dtype(dtype))
    panels = tuple(jnp.asarray(panel) for panel in np.split(kernel, num_panels, axis=1))
    linear.kernel.set_value(panels if num_panels > 1 else panels[0])
    linear.bias[...] = jnp.asarray(rng.standard_normal(24), dtype)
    linear.max_looped_tokens = max_looped_tokens
    return linear


def has_loop(linear: Linear, x: jax.Array) -> bool:
    return any(word in str(jax.make_jaxpr(linear)(x)) for word in ("while[", "scan["))


@pytest.mark.parametrize("num_panels", [1, 3])
@pytest.mark.parametrize(("num_tokens", "wanted"), [(1, False), (2, True), (4, True), (5, False)])
def test_few_tokens_are_multiplied_in_a_loop_where_that_is_asked_for(
    num_tokens, wanted, num_panels
):
    linear = looped_linear(num_panels=num_panels)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((num_tokens, 16)), jnp.float32)
    assert has_loop(linear, x) == wanted
    plain = looped_linear(num_panels=num_panels, max_looped_tokens=0)
    assert not has_loop(plain, x)
    products = (quick_jit(layer.__call__)(x) for layer in (linear, plain))
    np.testing.assert_allclose(*products, rtol=0, atol=1e-5)


def test_what_loops_cannot_multiply_is_left_to_the_compiler():
    for linear in (looped_linear("bfloat16"), looped_linear(in_features=12)):
        x = jnp.ones((2, linear.kernel.shape[0]), linear.kernel.dtype)
        assert not has_loop(linear, x)
        assert jax.eval_shape(linear, x).shape == (2, 24)


def test_rounded_kernels_are_not_looped_over():
    linear = looped_linear()
    linear.kernel = nnx.Param(linear.kernel[...].astype(jnp.bfloat16))
    assert not has_loop(linear, jnp.ones((2, 16)))
    linear.kernel = nnx.Param(jnp.ones((24, 16), jnp.int8))
    linear.kernel_scale = nnx.data(nnx.Param(jnp.ones(24)))
    assert not has_loop(linear, jnp.ones((2, 16)))


@pytest.mark.parametrize(("dtype", "shape"), [("bfloat16", (16, 24)), ("int8", (24, 16))])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 8), (7, 8), (9, 9)])
def test_rounded_kernels_are_multiplied_with_at_least_eight_rows(
    dtype, shape, num_tokens, num_rows
):
    """XLA:CPU takes ten times as long for fewer."""
    linear = Linear(16, 24, use_bias=False, dtype=jnp.float32)
    linear.kernel = nnx.Param(jnp.ones(shape, dtype))
    if dtype == "int8":
        linear.kernel_scale = nnx.data(nnx.Param(jnp.ones(24)))
    jaxpr = jax.make_jaxpr(linear)(jnp.ones((num_tokens, 16)))
    (dot,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert dot.outvars[0].aval.shape == (num_rows, 24)
    assert jaxpr.out_avals[0].shape == (num_tokens, 24)
