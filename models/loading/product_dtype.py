"""Rounds the weights of a model's products, so that a device multiplies numbers of fewer bits."""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from models.errors import ModelError
from models.layers.linear import Linear
from models.layers.product import round_to_int8
from models.layers.routing import Router
from models.loading.loaded_model import LoadedModel, flatten_state

# "auto" is the dtype of the model's other numbers.
ProductDtype = Literal["auto", "bfloat16", "int8"]


def with_product_dtype(model: LoadedModel, product_dtype: ProductDtype) -> LoadedModel:
    """The model with the kernels of its `Linear` layers in fewer bits.

    Activations are rounded where they meet such a kernel, sums are as wide as ever, and everything
    else stays in the model's dtype. "int8" has a step for every output of a kernel, and one for
    every token; nothing has to be calibrated.

    Kernels of int8 are stored [out, in] (`models.layers.product.dot_int32`).

    Embeddings are not rounded, nor is a head that reads the embedding, nor are experts and their
    router.

    Raises:
        ModelError: Kernels lie in panels: only whole columns are rounded.
    """
    if product_dtype == "auto":
        return model
    decoder = nnx.merge(model.graphdef, jax.tree.unflatten(model.params_treedef, model.params))
    for _, module in nnx.iter_modules(decoder):
        if isinstance(module, Linear) and not isinstance(module, Router):
            _round_linear(module, product_dtype)
    graphdef, state = nnx.split(decoder)
    names, params, treedef = flatten_state(state)
    return dataclasses.replace(
        model, graphdef=graphdef, params_treedef=treedef, param_names=names, params=params
    )


def _round_linear(linear: Linear, product_dtype: ProductDtype) -> None:
    kernel = linear.kernel.get_value()
    if isinstance(kernel, tuple):
        raise ModelError(
            f"a kernel consists of {len(kernel)} panels and cannot be rounded. Load the model "
            "without panel_width."
        )
    if product_dtype == "bfloat16":
        linear.kernel = nnx.Param(kernel.astype(jnp.bfloat16))
        return
    rounded, scale = _round_columns(kernel)
    linear.kernel = nnx.Param(rounded)
    linear.kernel_scale = nnx.data(nnx.Param(scale))


@jax.jit
def _round_columns(
    kernel: jax.Array,  # f[in, out]
) -> tuple[jax.Array, jax.Array]:  # i8[out, in], f32[out]
    rounded, scale = round_to_int8(kernel, axis=0)
    return rounded.T, scale
