"""Matrix products keep float32 sums, and the tied head equals the transposed copy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import ModelError
from models.layers.linear import Embedding, Linear, name_linears
from models.layers.product import dot_float32
from models.loading.kernel_encoder import KernelEncoder
from models.platforms import Platform
from tests import on_device
from tests.models.plain_context import plain_context


def test_linear_is_x_times_kernel_plus_bias():
    linear = Linear(2, 3, use_bias=True, dtype=jnp.float32)
    linear.kernel[...] = on_device.array([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]])
    linear.bias[...] = on_device.array([100.0, 0.0, 0.0])
    assert linear(on_device.array([[1.0, 2.0]]), plain_context()).tolist() == [[121.0, 42.0, 63.0]]


def test_the_context_may_change_what_a_linear_returns():
    linear = Linear(2, 3, use_bias=True, dtype=jnp.bfloat16)
    linear.kernel[...] = on_device.ones((2, 3), jnp.bfloat16)
    linear.bias[...] = on_device.ones(3, jnp.bfloat16)
    linear.name = "mlp.up_proj"
    calls = []

    def change(name, x, y, context):
        calls.append((name, x.tolist(), y.tolist(), context))
        return y + 2

    x = on_device.array([[1.0, 2.0]], jnp.bfloat16)
    context = plain_context().add_linear_change(change)
    assert linear(x, context).tolist() == [[6.0, 6.0, 6.0]]
    assert calls == [("mlp.up_proj", [[1.0, 2.0]], [[4.0, 4.0, 4.0]], context)]
    # A second one gets what the first one returned.
    both = context.add_linear_change(lambda name, x, y, context: 10 * y)
    assert linear(x, both).tolist() == [[60.0, 60.0, 60.0]]


@pytest.mark.parametrize(
    ("change", "given"),
    [(lambda y: y[:, :1], r"bfloat16\[1, 1\]"), (lambda y: y * jnp.float32(2), r"float32\[1, 3\]")],
)
def test_a_change_of_shape_or_dtype_is_refused(change, given):
    linear = Linear(2, 3, dtype=jnp.bfloat16)
    linear.name = "mlp.up_proj"
    context = plain_context().add_linear_change(lambda name, x, y, context: change(y))
    with pytest.raises(
        ModelError, match=rf"'mlp.up_proj' returns from bfloat16\[1, 3\] to {given}"
    ):
        linear(on_device.ones((1, 2), jnp.bfloat16), context)


def test_names_are_paths_in_the_layer_and_else_in_the_model():
    class Block(nnx.Module):
        def __init__(self) -> None:
            self.up_proj = Linear(2, 2, dtype=jnp.float32)

    class Model(nnx.Module):
        def __init__(self) -> None:
            self.layers = nnx.List([nnx.List([Block(), Block()]), Block()])
            self.lm_head = Linear(2, 2, dtype=jnp.float32)

    model = Model()
    name_linears(model)
    assert [block.up_proj.name for block in model.layers[0]] == ["0.up_proj", "1.up_proj"]
    assert (model.layers[1].up_proj.name, model.lm_head.name) == ("up_proj", "lm_head")


def test_linear_without_bias_has_none():
    assert Linear(2, 3, use_bias=False, dtype=jnp.float32).bias is None


def test_bfloat16_products_are_summed_in_float32():
    # In bfloat16, 256 + 1 is 256: a sum in that dtype would never pass 256.
    ones = on_device.ones((1, 4096), jnp.bfloat16)
    assert dot_float32(ones, on_device.ones((4096, 1), jnp.bfloat16)).tolist() == [[4096.0]]
    out = Linear(4096, 1, use_bias=False, dtype=jnp.bfloat16)(ones, plain_context())
    assert out.dtype == jnp.bfloat16


def test_tied_head_scores_tokens_with_their_embeddings():
    embedding = Embedding(3, 2, dtype=jnp.float32)
    embedding.embedding[...] = on_device.array([[1.0, 0.0], [0.0, 1.0], [2.0, 3.0]])
    assert embedding(on_device.array([2, 0])).tolist() == [[2.0, 3.0], [1.0, 0.0]]
    scores = embedding.attend(on_device.array([[1.0, 10.0]]))
    np.testing.assert_array_equal(scores, [[1.0, 10.0, 32.0]])


def test_embedding_scale_is_rounded_to_the_tables_dtype_and_not_in_the_head():
    # sqrt(3072) is 55.43; bfloat16 has 55.25 and 55.5 around it.
    for dtype, scale in ((jnp.float32, 3072**0.5), (jnp.bfloat16, 55.5)):
        embedding = Embedding(2, 1, dtype=dtype, scale=3072**0.5)
        embedding.embedding[...] = on_device.array([[0.0], [2.0]], dtype)
        np.testing.assert_array_equal(
            embedding(on_device.array([1]))[0, 0], on_device.array(2 * scale, dtype)
        )
        assert embedding.attend(on_device.ones((1, 1), dtype)).tolist() == [[0.0, 2.0]]


@pytest.mark.parametrize("product_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize(("num_tokens", "num_rows"), [(1, 8), (7, 8), (9, 9)])
def test_rounded_kernels_are_multiplied_with_at_least_eight_rows(
    product_dtype, num_tokens, num_rows
):
    """XLA:CPU takes ten times as long for fewer."""
    linear = Linear(16, 24, use_bias=False, dtype=jnp.float32)
    encoder = KernelEncoder(platform=Platform(), product_dtype=product_dtype, panel_width=None)
    kernel = linear.kernel.get_value()
    linear.kernel.set_value(encoder.encode(kernel, "matrix", is_router=False))
    jaxpr = jax.make_jaxpr(linear.product)(on_device.ones((num_tokens, 16)))
    (dot,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
    assert dot.outvars[0].aval.shape == (num_rows, 24)
    assert jaxpr.out_avals[0].shape == (num_tokens, 24)
