"""Products in loops are those of NumPy, for any number of rows and kernels beside each other."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.layers.few_rows import is_worth_a_loop, multiply_few_rows
from tests.quick_compile import quick_jit

TOLERANCE = 1e-5  # of the largest absolute number


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32))


def random_kernels(in_features: int, widths: list[int]) -> list[jax.Array]:
    return [random_array(in_features, width, seed=idx) for idx, width in enumerate(widths, 1)]


def check_products(num_tokens: int, in_features: int, widths: list[int]) -> None:
    x, kernels = random_array(num_tokens, in_features), random_kernels(in_features, widths)
    products = quick_jit(multiply_few_rows)(x, kernels)
    assert len(products) == len(kernels)
    for product, kernel in zip(products, kernels, strict=True):
        wanted = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
        assert (product.shape, product.dtype) == (wanted.shape, jnp.float32)
        np.testing.assert_allclose(product, wanted, rtol=0, atol=TOLERANCE * abs(wanted).max())


@pytest.mark.parametrize("num_tokens", [1, 2, 8, 9, 24, 33])
def test_any_number_of_rows(num_tokens):
    check_products(num_tokens, 64, [40])


@pytest.mark.parametrize("in_features", [8, 16, 72, 1_000])
def test_any_number_of_turns(in_features):
    check_products(3, in_features, [5, 16])


@pytest.mark.parametrize(
    "widths", [[1], [512, 512, 1], [1_024, 1_024, 8], [2_048, 3], [3_000, 3_000], [1_500, 600, 600]]
)
def test_kernels_of_any_width_beside_each_other(widths):
    """Of one loop or of several, and each with its own columns."""
    check_products(4, 16, widths)


def test_a_row_has_the_same_bits_whatever_others_are_beside_it():
    kernels = random_kernels(512, [512, 96])
    x = random_array(32, 512)
    together = jax.jit(multiply_few_rows)(x, kernels)
    for rows in (slice(5, 6), slice(0, 8), slice(3, 19), slice(8, 32)):
        alone = jax.jit(multiply_few_rows)(x[rows], kernels)
        for part, whole in zip(alone, together, strict=True):
            np.testing.assert_array_equal(part, whole[rows])


def test_rows_that_are_not_numbers_stay_among_themselves():
    x = random_array(4, 64).at[1].set(jnp.nan).at[2].set(jnp.inf)
    (product,) = quick_jit(multiply_few_rows)(x, random_kernels(64, [24]))
    assert np.isfinite(product).all(axis=1).tolist() == [True, False, False, True]


@pytest.mark.parametrize(
    ("num_tokens", "in_features", "wanted"),
    [(2, 8, True), (8, 512, True), (9, 512, True), (32, 512, True)]
    + [(17, 512, False), (24, 512, False), (8, 12, False)],
)
def test_numbers_of_tokens_and_inputs_that_are_worth_a_loop(num_tokens, in_features, wanted):
    assert is_worth_a_loop(num_tokens, in_features) == wanted


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's compiler is looked at")
def test_memory_of_a_program_does_not_grow_with_its_loops():
    kernels = random_kernels(128, [128] * 6)

    def temp_bytes(num_products: int) -> int:
        def multiply(x: jax.Array) -> jax.Array:
            for kernel in kernels[:num_products]:
                (x,) = multiply_few_rows(x, [kernel])
            return x

        compiled = jax.jit(multiply).lower(random_array(32, 128)).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    # Less than the sums of one more.
    assert temp_bytes(6) < temp_bytes(3) + 32 * 128 * 4


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the CPU's compiler is looked at")
def test_a_turn_reads_the_kernels_where_they_lie():
    """What it is written for: a slice of a kernel that is copied first would cost as much again."""
    x, kernels = random_array(16, 512), random_kernels(512, [512, 256])
    text = jax.jit(multiply_few_rows).lower(x, kernels).compile().as_text()
    computations = re.findall(r"^(%\S+) \([^\n]*\{\n(.*?)^\}", text, re.MULTILINE | re.DOTALL)
    slicing = {name: body for name, body in computations if " dynamic-slice(" in body}
    # One fused expression for each kernel, of both slices of each run and what is made of them.
    assert len(slicing) == len(kernels)
    for name, body in slicing.items():
        assert body.count(" dynamic-slice(") == 16
        assert re.search(r"ROOT %\S+ = f32\[\d+,16\]\S* add\(", body)
        assert len(re.findall(rf" fusion\([^\n]*calls={re.escape(name)}(?![\w.])", text)) == 1
