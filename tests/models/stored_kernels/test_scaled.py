"""Products with integers and scales are those of the floats that these stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import load_model
from models.decoders.chosen_layer import choose_layer
from models.layers.experts import Experts
from models.layers.linear import Linear
from models.layers.routing import Routing
from models.stored_kernels.scaled import ScaledKernel, fitting_group_size
from models.stored_kernels.use_kernel import multiply
from tests.compiler_flags import AS_FOR_USERS
from tests.models.plain_context import plain_context
from tests.models.steppers import checkpoint_folder
from tests.models.stored_kernels.dequantized import dequantized

TOLERANCE = 1e-5  # of the largest number
BITS = [4, 8]
# All columns in one panel; panels of 48, 48 and 48 columns, of which the last holds 4 without use.
PANEL_WIDTHS = [None, 64]
IN, OUT = 96, 140


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def quantized(*shape: int, num_bits: int, panel_width: int | None = 64, seed: int = 0):
    return ScaledKernel.quantize(
        random_array(*shape, seed=seed), num_bits=num_bits, group_size=32, panel_width=panel_width
    )


def assert_near(got: jax.Array, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize("num_bits", BITS)
def test_numbers_are_rounded_to_the_steps_of_their_group(num_bits):
    values_np = np.asarray(random_array(IN, OUT))
    kernel = quantized(IN, OUT, num_bits=num_bits)
    groups_np = values_np.reshape(3, 32, OUT)
    steps_np = np.abs(groups_np).max(axis=1, keepdims=True) / (8 if num_bits == 4 else 127)
    # With 4 bits, -8 has no opposite: the largest number of the other sign may lose a whole step.
    largest = 1 if num_bits == 4 else 0.5
    errors_np = np.abs(dequantized(kernel).reshape(groups_np.shape) - groups_np)
    assert (errors_np <= steps_np * (largest + 1e-4)).all()
    assert np.median(errors_np / steps_np) < 0.3
    assert kernel.shape == (IN, OUT)
    assert kernel.numbers.nbytes == IN * 144 * num_bits // 8


@pytest.mark.parametrize("panel_width", PANEL_WIDTHS)
@pytest.mark.parametrize("num_bits", BITS)
@pytest.mark.parametrize("num_rows", [1, 5])
def test_product_of_a_linear_is_that_of_the_widened_kernel(num_rows, num_bits, panel_width):
    linear = Linear(IN, OUT, dtype=jnp.float32)
    kernel = quantized(IN, OUT, num_bits=num_bits, panel_width=panel_width)
    linear.kernel.set_value(kernel)
    x = random_array(num_rows, IN, seed=1)
    assert_near(jax.jit(linear.product)(x), np.asarray(x, np.float64) @ dequantized(kernel))


def test_zero_points_are_those_of_groups():
    rng = np.random.default_rng(0)
    numbers_np = rng.integers(0, 16, (3, 32, OUT), np.uint8)
    zeros_np = rng.integers(0, 16, (3, OUT), np.uint8)
    scales = random_array(3, OUT)
    arrays = (jnp.asarray(numbers_np), scales, jnp.asarray(zeros_np))
    kernel = ScaledKernel.pack(*arrays, panel_width=64)
    exact_np = (numbers_np.astype(np.float32) - zeros_np[:, None]) * np.asarray(scales)[:, None]
    np.testing.assert_array_equal(dequantized(kernel), exact_np.reshape(IN, OUT))
    linear = Linear(IN, OUT, dtype=jnp.float32)
    linear.kernel.set_value(kernel)
    x = random_array(2, IN)
    assert_near(jax.jit(linear.product)(x), np.asarray(x, np.float64) @ exact_np.reshape(IN, OUT))


def test_16_bit_products_are_those_of_the_rounded_kernel():
    linear = Linear(IN, OUT, dtype=jnp.bfloat16)
    kernel = quantized(IN, OUT, num_bits=4)
    linear.kernel.set_value(kernel)
    x = random_array(4, IN).astype(jnp.bfloat16)
    widened = jnp.asarray(dequantized(kernel)).astype(jnp.bfloat16)
    wanted = np.asarray(x, np.float64) @ np.asarray(widened, np.float64)
    assert_near(jax.jit(linear.product)(x), wanted)


def make_experts(num_bits: int, panel_width: int | None, seed: int) -> tuple[Experts, Experts]:
    """Experts of integers, and the same ones with the floats that these stand for."""
    kept, plain = (Experts(4, 64, 96, activation="silu", dtype=jnp.float32) for _ in range(2))
    for name in ("gate_proj", "up_proj", "down_proj"):
        linear = getattr(kept, name)
        kernel = ScaledKernel.quantize(
            random_array(*linear.kernel.get_value().shape, seed=seed),
            num_bits=num_bits,
            group_size=32,
            panel_width=panel_width,
        )
        linear.kernel.set_value(kernel)
        getattr(plain, name).kernel.set_value(jnp.asarray(dequantized(kernel)))
    return kept, plain


@pytest.mark.parametrize("panel_width", [None, 48])
@pytest.mark.parametrize("num_bits", BITS)
def test_experts_compute_as_the_widened_ones(num_bits, panel_width):
    pairs = [make_experts(num_bits, panel_width, seed) for seed in (1, 2)]
    x = random_array(9, 64, seed=3)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(4), (9, 1)), axis=1)[:, :2]
    routing = Routing(jnp.asarray(ids, jnp.int32), jnp.full((9, 2), 0.5))
    context = plain_context(9)

    @jax.jit
    def run(layer_idx, x):
        kept = [pair[0] for pair in pairs]
        return choose_layer(kept, layer_idx)(x, routing, context), kept[0](x, routing, context)

    plain = [jax.jit(lambda x, own=own: own(x, routing, context))(x) for _, own in pairs]
    for layer_idx, wanted in enumerate(plain):
        chosen, first = run(layer_idx, x)
        assert_near(chosen, np.asarray(wanted))
        assert_near(first, np.asarray(plain[0]))


@pytest.mark.parametrize("num_bits", BITS)
def test_a_tied_head_is_quantized_and_its_embedding_is_not(num_bits):
    folder = checkpoint_folder("llama_tied")
    plain, kept = (
        load_model(folder, dtype="float32", quantization=name)
        for name in ("none", f"int{num_bits}")
    )
    embedding = plain.parameters["embed_tokens.embedding"]
    rows = embedding.T if embedding.shape[0] == plain.config.hidden_size else embedding
    np.testing.assert_array_equal(kept.parameters["embed_tokens.embedding"], rows)
    head = kept.parameters["lm_head.kernel"]
    assert isinstance(head, ScaledKernel)
    hidden = random_array(3, plain.config.hidden_size)
    wanted = np.asarray(hidden, np.float64) @ dequantized(head)
    assert_near(jax.jit(kept.compute_logits)(kept.params, hidden), wanted)
    exact = np.asarray(plain.compute_logits(plain.params, hidden))
    error = np.linalg.norm(wanted - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < {4: 0.15, 8: 0.01}[num_bits]


@pytest.mark.parametrize(
    ("num_rows", "operation"), [(1, "convert_element_type"), (3, "dot_general")]
)
def test_a_layer_of_a_loop_uses_its_own_kernel(num_rows, operation):
    linears = [Linear(IN, OUT, dtype=jnp.float32) for _ in range(3)]
    for seed, linear in enumerate(linears):
        linear.kernel.set_value(quantized(IN, OUT, num_bits=4, seed=seed))
    x = random_array(num_rows, IN)
    run = jax.jit(lambda idx, x: choose_layer(linears, idx).product(x))
    for idx, linear in enumerate(linears):
        assert_near(run(idx, x), np.asarray(x, np.float64) @ dequantized(linear.kernel.get_value()))
    # The product itself exists once, whatever the number of layers.
    counts = [
        str(
            jax.make_jaxpr(lambda idx, x, some=some: choose_layer(some, idx).product(x))(0, x)
        ).count(operation)
        for some in (linears, linears[:2])
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("num_bits", BITS)
def test_one_row_is_multiplied_without_panels_of_floats(num_bits):
    """XLA:CPU widens the numbers where it adds their products."""
    kernel = quantized(512, 2048, num_bits=num_bits, panel_width=128)
    program = jax.jit(multiply).lower(random_array(1, 512), kernel).compile(AS_FOR_USERS)
    # A panel of floats has 256 KiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**17


@pytest.mark.parametrize("has_zeros", [False, True])
def test_one_row_is_multiplied_with_every_panel(has_zeros):
    """More panels than a turn of the loop has, and not a multiple of them."""
    rng = np.random.default_rng(0)
    numbers_np = rng.integers(0, 16, (2, 24, 37 * 16), np.uint8)
    zeros_np = rng.integers(0, 16, (2, 37 * 16), np.uint8) if has_zeros else None
    scales = random_array(2, 37 * 16)
    zeros = None if zeros_np is None else jnp.asarray(zeros_np)
    kernel = ScaledKernel.pack(jnp.asarray(numbers_np), scales, zeros, panel_width=16)
    assert kernel.num_panels == 37
    x = random_array(1, 48, seed=1)
    assert_near(jax.jit(multiply)(x, kernel), np.asarray(x, np.float64) @ dequantized(kernel))


def test_split_along_inputs_and_outputs():
    kernel = quantized(IN, OUT, num_bits=4, panel_width=None)
    assert kernel.specs(("inner", None)) == (
        PartitionSpec(None, "model", None, None),
        PartitionSpec(None, "model", None),
    )
    assert kernel.specs((None, "inner"))[0] == PartitionSpec(None, None, None, "model")
    panels = quantized(IN, OUT, num_bits=4, panel_width=64)
    assert panels.specs((None, "inner")) == (PartitionSpec(),) * 2


@pytest.mark.parametrize(
    ("in_features", "group_size", "fitting"),
    [(4096, 128, 128), (4096, 32, 32), (96, 128, 32), (48, 128, 16), (40, 128, None)],
)
def test_groups_divide_the_inputs(in_features, group_size, fitting):
    assert fitting_group_size(in_features, group_size) == fitting
