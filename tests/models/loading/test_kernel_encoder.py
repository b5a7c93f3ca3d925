"""Kernels in fewer bits: near the model's own logits, and everything else as it was."""

import importlib.resources
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from models.errors import ModelError
from models.loading.kernel_encoder import KernelEncoder
from models.platforms import CPU, Platform
from models.stored_kernels.bits16 import Bits16Kernel
from models.stored_kernels.rounded_int8 import RoundedInt8Kernel
from models.stored_kernels.use_kernel import as_stored_kernel, multiply
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
    rounded = load_model(DEMO, product_dtype=product_dtype)
    assert rounded.parameters.keys() - {"lm_head.kernel"} == own_model.parameters.keys()
    for name, own in own_model.parameters.items():
        value = rounded.parameters[name]
        assert value.shape == own.shape
        if name.endswith(".kernel"):
            assert as_stored_kernel(value).product_dtype == kernel_dtype
        else:
            assert np.array_equal(value, own)


def test_columns_keep_255_steps_of_their_own():
    values_np = np.random.default_rng(0).standard_normal((48, 20), np.float32)
    rounded = RoundedInt8Kernel.of(jnp.asarray(values_np))
    numbers_np, scales_np = np.asarray(rounded.numbers).T, np.asarray(rounded.scales)
    assert numbers_np.dtype == np.int8
    assert np.abs(numbers_np).max(axis=0).tolist() == [127] * 20
    difference_np = numbers_np * scales_np - values_np
    assert (np.abs(difference_np) <= scales_np * 0.5001).all()


def test_unknown_dtype_is_refused_by_name():
    with pytest.raises(
        ModelError, match=r"product_dtype is 'int4'; expected one of auto, bfloat16"
    ):
        load_model(DEMO, product_dtype="int4")


def test_token_of_zeros_has_a_product_of_zeros():
    kernel = RoundedInt8Kernel.of(jnp.ones((16, 24)))
    assert np.array_equal(multiply(jnp.zeros((2, 16)), kernel), np.zeros((2, 24)))


@pytest.mark.parametrize("product_dtype", ["bfloat16", "int8"])
def test_routers_and_other_layouts_are_not_rounded(product_dtype):
    encoder = KernelEncoder(platform=Platform(), product_dtype=product_dtype, panel_width=None)
    array = jnp.ones((16, 24))
    assert encoder.encode(array, "matrix", is_router=True) is array
    for layout in ("table", "experts", "heads", "vector"):
        assert encoder.encode(array, layout, is_router=False) is array
    assert encoder.encode(array, "matrix", is_router=False) is not array


def test_a_cpu_keeps_experts_of_16_bits_as_integers():
    platform = CPU(num_threads=1, instruction_sets=frozenset())
    encoder = KernelEncoder(platform=platform, product_dtype="auto", panel_width=None)
    values = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 4)), jnp.bfloat16)
    stored = encoder.encode(values, "experts", is_router=False)
    assert isinstance(stored, Bits16Kernel)
    np.testing.assert_array_equal(np.asarray(stored.bits), np.asarray(values).view(np.uint16))
