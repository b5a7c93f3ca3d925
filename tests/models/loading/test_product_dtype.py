"""Products in fewer bits: near the model's own logits, and everything else as it was."""

import importlib.resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import load_model
from models.errors import ModelError
from models.loading import product_dtype as module
from tests.oracles.paged_stepper import PagedStepper

DEMO = Path(str(importlib.resources.files("models.demo") / "checkpoint"))
# Largest difference over the norm of the logits, as in docs/guide/tuning.md, and what none has.
WORST_ERROR = {"bfloat16": 0.01, "int8": 0.05}
LEAST_ERROR = 1e-5


@pytest.fixture(scope="module")
def own_model():
    return load_model(DEMO)


@pytest.fixture(scope="module")
def own_stepper(own_model):
    return PagedStepper(own_model)


@pytest.mark.parametrize("product_dtype", WORST_ERROR)
def test_logits_are_as_near_as_stated(own_model, own_stepper, product_dtype):
    rounded = load_model(DEMO, product_dtype=product_dtype)
    prompts = np.random.default_rng(0).integers(3, own_model.config.vocab_size, (3, 16))
    # The trained model's own kind of text, and a decode step of fewer rows than products take.
    chunks = [{row: prompt.tolist() for row, prompt in enumerate(prompts)}, {0: [5]}]
    own_stepper.reset()
    steppers = own_stepper, PagedStepper(rounded)
    for chunk in chunks:
        truth, got = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            error = np.linalg.norm(got[row] - truth[row]) / np.linalg.norm(truth[row])
            assert LEAST_ERROR < error < WORST_ERROR[product_dtype]


@pytest.mark.parametrize(
    ("product_dtype", "kernel_dtype"), [("bfloat16", jnp.bfloat16), ("int8", jnp.int8)]
)
def test_kernels_alone_are_rounded(own_model, product_dtype, kernel_dtype):
    rounded = module.with_product_dtype(own_model, product_dtype)
    params = dict(zip(rounded.param_names, rounded.params, strict=True))
    own_params = dict(zip(own_model.param_names, own_model.params, strict=True))
    for name, own_param in own_params.items():
        if name.endswith(".kernel"):
            assert params[name].dtype == kernel_dtype
            # What is summed lies together in int8.
            is_turned = product_dtype == "int8"
            assert params[name].shape == (own_param.T if is_turned else own_param).shape
        else:
            assert np.array_equal(params[name], own_param)
    added = set(params) - set(own_params)
    assert all(name.endswith(".kernel_scale") for name in added)
    assert bool(added) == (product_dtype == "int8")
    own_specs = dict(zip(own_model.param_names, own_model.param_specs, strict=True))
    for name, spec in zip(rounded.param_names, rounded.param_specs, strict=True):
        is_turned = product_dtype == "int8" and name.endswith(".kernel")
        if name in own_specs:
            assert spec == (PartitionSpec(*own_specs[name][::-1]) if is_turned else own_specs[name])
        else:  # a scale, split as a kernel's outputs are
            split_out = own_specs[name.removesuffix("_scale")][1]
            assert spec == (PartitionSpec() if split_out is None else PartitionSpec(split_out))


def test_columns_keep_255_steps_of_their_own(own_model):
    rounded = module.with_product_dtype(own_model, "int8")
    params = dict(zip(rounded.param_names, rounded.params, strict=True))
    own = dict(zip(own_model.param_names, own_model.params, strict=True))
    name = "layers.0.mlp.down_proj.kernel"
    scale = np.asarray(params[f"{name}_scale"])
    rounded_kernel = np.asarray(params[name]).T
    assert np.abs(rounded_kernel).max(axis=0).min() == 127
    difference = rounded_kernel * scale - np.asarray(own[name])
    assert (np.abs(difference) <= scale * 0.5001).all()


def test_auto_is_the_model_itself(own_model):
    assert module.with_product_dtype(own_model, "auto") is own_model


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(
        ModelError, match=r"product_dtype is 'int4'; expected one of auto, bfloat16"
    ):
        load_model(DEMO, product_dtype="int4")


def test_token_of_zeros_has_a_product_of_zeros(own_model):
    rounded = module.with_product_dtype(own_model, "int8")
    params = jax.tree.unflatten(rounded.params_treedef, rounded.params)
    linear = module.nnx.merge(rounded.graphdef, params).layers[0].mlp.down_proj
    num_out, num_in = linear.kernel[...].shape
    assert np.array_equal(linear.product(jnp.zeros((2, num_in))), np.zeros((2, num_out)))
