"""Products with integers and scales are those of the floats that the numbers stand for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import KernelSettings, load_model
from models.decoders.chosen_layer import choose_layer
from models.layers.experts import Experts
from models.layers.layer_stack import InStack, find_places
from models.layers.linear import Linear
from models.layers.routing import Routing
from models.loading.write_stack import finish_stack, write_layer
from models.stored_kernels.scaled import ScaledKernel, fitting_group_size
from models.stored_kernels.use_kernel import multiply
from pallas_kernels.number_format import NumberFormat, as_float32, factor_of
from tests.compiler_flags import AS_FOR_USERS
from tests.models.layers.test_layer_stack import put_in_stacks
from tests.models.plain_context import plain_context
from tests.models.steppers import checkpoint_folder
from tests.models.stored_kernels.dequantized import FLOATS, dequantized

TOLERANCE = 1e-5  # of the largest number
FORMATS = ["int4", "int8", "e4m3", "e2m1"]
ROUNDED = FORMATS[:3]
IN, OUT = 96, 140


def random_array(*shape: int, seed: int = 0) -> jax.Array:
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def quantized(
    *shape: int, number_format: NumberFormat, panel_width: int | None = 64, seed: int = 0
) -> ScaledKernel:
    """Random numbers in groups of 32."""
    if number_format != "e2m1":
        values = random_array(*shape, seed=seed)
        arguments = {"number_format": number_format, "panel_width": panel_width}
        return ScaledKernel.quantize(values, group_size=32, **arguments)
    # As of a checkpoint: scales are powers of two.
    rng = np.random.default_rng(seed)
    *experts, num_inputs, num_outputs = shape
    numbers_np = rng.integers(0, 16, (*experts, num_inputs // 32, 32, num_outputs), np.uint8)
    scales_np = rng.integers(123, 126, (*experts, num_inputs // 32, num_outputs), np.uint8)
    arrays = (*jax.device_put((numbers_np, scales_np)), None)
    return ScaledKernel.pack(*arrays, number_format="e2m1", panel_width=panel_width)


def multiply_plainly(x: jax.Array, kernel: ScaledKernel) -> jax.Array:
    return multiply(x, kernel, KernelSettings())


def assert_near(got: jax.Array, wanted: np.ndarray) -> None:
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE * np.abs(wanted).max())


@pytest.mark.parametrize(("number_format", "num_bits"), [("int4", 4), ("int8", 8)])
def test_numbers_are_rounded_to_the_steps_of_their_group(number_format, num_bits):
    values_np = np.asarray(random_array(IN, OUT))
    kernel = quantized(IN, OUT, number_format=number_format)
    groups_np = values_np.reshape(3, 32, OUT)
    steps_np = np.abs(groups_np).max(axis=1, keepdims=True) / (8 if num_bits == 4 else 127)
    # With 4 bits, -8 has no opposite: the largest number of the other sign may lose a whole step.
    largest = 1 if num_bits == 4 else 0.5
    errors_np = np.abs(dequantized(kernel).reshape(groups_np.shape) - groups_np)
    assert (errors_np <= steps_np * (largest + 1e-4)).all()
    assert np.median(errors_np / steps_np) < 0.3
    assert kernel.shape == (IN, OUT)
    assert kernel.numbers.nbytes == IN * 144 * num_bits // 8


@pytest.mark.parametrize(("number_format", "num_codes"), [("e4m3", 256), ("e2m1", 16)])
def test_every_float_is_widened_exactly(number_format, num_codes):
    codes_np = np.arange(num_codes, dtype=np.uint8)
    wanted_np = codes_np.view(FLOATS[number_format]).astype(np.float32)
    got = jax.jit(as_float32, static_argnums=1)(codes_np, number_format) * factor_of(number_format)
    is_number = ~np.isnan(wanted_np)  # two of e4m3 are not; the loader refuses them
    assert is_number.sum() >= num_codes - 2
    np.testing.assert_array_equal(np.asarray(got)[is_number], wanted_np[is_number])
    assert np.signbit(np.asarray(got)[num_codes // 2])


def test_rounding_to_floats_keeps_the_largest_number_and_is_near():
    values_np = np.asarray(random_array(IN, OUT))
    rounded_np = dequantized(quantized(IN, OUT, number_format="e4m3"))
    steps_np = np.abs(values_np.reshape(3, 32, OUT)).max(axis=1).repeat(32, axis=0) / 448
    # Half of the last of 3 bits of mantissa, and of the smallest number.
    allowed_np = np.maximum(np.abs(values_np) / 16, steps_np * 2.0**-10) * (1 + 1e-4)
    assert (np.abs(rounded_np - values_np) <= allowed_np).all()
    largest = np.abs(values_np).max(axis=0)
    np.testing.assert_allclose(np.abs(rounded_np).max(axis=0), largest, rtol=1e-6)


# A panel width of 64 makes three panels of 48 columns, of which the last holds 4 without use. None
# makes one panel.
@pytest.mark.parametrize(
    ("num_rows", "panel_width", "number_format"),
    [
        *((num_rows, 64, number_format) for num_rows in (1, 5) for number_format in FORMATS),
        (5, None, "int4"),
        *(pytest.param(5, None, name, marks=pytest.mark.slow) for name in FORMATS[1:]),
    ],
)
def test_product_of_a_linear_is_that_of_the_widened_kernel(num_rows, number_format, panel_width):
    linear = Linear(IN, OUT, dtype=jnp.float32)
    kernel = quantized(IN, OUT, number_format=number_format, panel_width=panel_width)
    linear.kernel.set_value(kernel)
    x = random_array(num_rows, IN, seed=1)
    assert_near(jax.jit(linear.product)(x), np.asarray(x, np.float64) @ dequantized(kernel))


def test_zero_points_are_those_of_groups():
    rng = np.random.default_rng(0)
    numbers_np = rng.integers(0, 16, (3, 32, OUT), np.uint8)
    zeros_np = rng.integers(0, 16, (3, OUT), np.uint8)
    scales = random_array(3, OUT)
    arrays = (numbers_np, scales, zeros_np)
    kernel = ScaledKernel.pack(*arrays, number_format="int4", panel_width=64)
    exact_np = (numbers_np.astype(np.float32) - zeros_np[:, None]) * np.asarray(scales)[:, None]
    np.testing.assert_array_equal(dequantized(kernel), exact_np.reshape(IN, OUT))
    linear = Linear(IN, OUT, dtype=jnp.float32)
    linear.kernel.set_value(kernel)
    x = random_array(2, IN)
    assert_near(jax.jit(linear.product)(x), np.asarray(x, np.float64) @ exact_np.reshape(IN, OUT))


def test_16_bit_products_are_those_of_the_rounded_kernel():
    linear = Linear(IN, OUT, dtype=jnp.bfloat16)
    kernel = quantized(IN, OUT, number_format="int4")
    linear.kernel.set_value(kernel)
    x = np.asarray(random_array(4, IN)).astype(jnp.bfloat16)
    widened = dequantized(kernel).astype(jnp.bfloat16)
    wanted = np.asarray(x, np.float64) @ np.asarray(widened, np.float64)
    assert_near(jax.jit(linear.product)(x), wanted)


def make_experts(
    number_format: NumberFormat, panel_width: int | None, seed: int
) -> tuple[Experts, list[np.ndarray]]:
    """Experts of few bits, and their kernels: gate, up and down."""
    experts = Experts(4, 64, 96, activation="silu", dtype=jnp.float32)
    linears = [experts.gate_proj, experts.up_proj, experts.down_proj]
    for linear in linears:
        shape = linear.kernel.get_value().shape
        kernel = quantized(*shape, number_format=number_format, panel_width=panel_width, seed=seed)
        linear.kernel.set_value(kernel)
    return experts, [dequantized(linear.kernel.get_value()) for linear in linears]


def experts_in_numpy(kernels: list[np.ndarray], x: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """The mean of the two experts of each row."""
    gates, ups, downs = kernels
    out = np.zeros_like(x)
    for row, row_ids in enumerate(ids):
        for expert in row_ids:
            gate, up = x[row] @ gates[expert], x[row] @ ups[expert]
            out[row] += (gate / (1 + np.exp(-gate)) * up) @ downs[expert] / 2
    return out


@pytest.mark.parametrize(
    ("number_format", "panel_width"),
    [
        ("int4", None),
        ("e2m1", 48),
        pytest.param("int8", 48, marks=pytest.mark.slow),
        pytest.param("int4", 48, marks=pytest.mark.slow),
        pytest.param("e4m3", None, marks=pytest.mark.slow),
    ],
)
def test_experts_compute_as_the_widened_ones(number_format, panel_width):
    pairs = [make_experts(number_format, panel_width, seed) for seed in (1, 2)]
    in_stacks = [make_experts(number_format, panel_width, seed)[0] for seed in (1, 2)]
    put_in_stacks(in_stacks)
    x = random_array(9, 64, seed=3)
    ids = np.random.default_rng(0).permuted(np.tile(np.arange(4), (9, 1)), axis=1)[:, :2]
    routing = Routing(ids.astype(np.int32), np.full((9, 2), 0.5, np.float32))
    context = plain_context(9)

    @jax.jit
    def run(layer_idx, x):
        apart = [pair[0] for pair in pairs]
        layers = (choose_layer(apart, layer_idx), apart[0], choose_layer(in_stacks, layer_idx))
        return [layer(x, routing, context) for layer in layers]

    wanted = [experts_in_numpy(kernels, np.asarray(x, np.float64), ids) for _, kernels in pairs]
    for layer_idx, of_layer in enumerate(wanted):
        chosen, first, chosen_in_stack = run(layer_idx, x)
        assert_near(chosen, of_layer)
        assert_near(first, wanted[0])
        assert_near(chosen_in_stack, of_layer)


@pytest.mark.parametrize(
    ("name", "worst"),
    [("int4", 0.15), ("fp8", 0.04), pytest.param("int8", 0.01, marks=pytest.mark.slow)],
)
def test_a_quantized_tied_head_is_the_embedding(name, worst):
    folder = checkpoint_folder("llama_tied")
    plain, kept = (
        load_model(folder, dtype="float32", quantization=quantization)
        for quantization in ("none", name)
    )
    head = kept.parameters["embed_tokens.embedding"]
    assert isinstance(head, ScaledKernel)
    assert "lm_head.kernel" not in kept.parameters
    token_ids = np.array([0, plain.config.vocab_size - 1, 7, 7])
    rows = jax.jit(kept.embed)(kept.params, token_ids)
    np.testing.assert_array_equal(rows, dequantized(head)[:, token_ids].T)
    hidden = random_array(3, plain.config.hidden_size)
    wanted = np.asarray(hidden, np.float64) @ dequantized(head)
    assert_near(jax.jit(kept.compute_logits)(kept.params, hidden), wanted)
    exact = np.asarray(plain.compute_logits(plain.params, hidden))
    error = np.linalg.norm(wanted - exact) / np.linalg.norm(exact)
    assert 1e-3 < error < worst


@pytest.mark.parametrize(
    ("num_rows", "operation"), [(1, "convert_element_type"), (3, "dot_general")]
)
def test_a_layer_of_a_loop_uses_its_own_kernel(num_rows, operation):
    linears = [Linear(IN, OUT, dtype=jnp.float32) for _ in range(3)]
    for seed, linear in enumerate(linears):
        linear.kernel.set_value(quantized(IN, OUT, number_format="int4", seed=seed))
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


@pytest.mark.parametrize(
    ("num_rows", "number_format", "panel_width"),
    [
        (1, "int8", 32),
        (3, "int4", None),
        pytest.param(3, "int8", 32, marks=pytest.mark.slow),
        pytest.param(1, "int4", None, marks=pytest.mark.slow),
    ],
)
def test_a_layer_of_a_stack_uses_its_own_kernel(num_rows, number_format, panel_width):
    linears = [Linear(IN, OUT, dtype=jnp.float32) for _ in range(3)]
    names = [f"layers.{idx}.up_proj.kernel" for idx in range(3)]
    shape = jax.ShapeDtypeStruct((1, IN, OUT), jnp.float32)
    places, stack, x = find_places(dict.fromkeys(names, shape)), None, random_array(num_rows, IN)
    wanted = []
    for seed, name in enumerate(names):
        options = {"number_format": number_format, "panel_width": panel_width}
        kernel = quantized(IN, OUT, seed=seed, **options)
        wanted.append(np.asarray(x, np.float64) @ dequantized(kernel))
        stack = write_layer(stack, kernel, places[name])
    stack = finish_stack(stack)
    for idx, linear in enumerate(linears):
        linear.kernel.set_value(InStack(stack=stack, layer_idx=np.int32(idx), num_layers=3))
    run = jax.jit(lambda idx, x: (choose_layer(linears, idx).product(x), linears[1].product(x)))
    for idx, product in enumerate(wanted):
        chosen, second = run(idx, x)
        assert_near(chosen, product)
        assert_near(second, wanted[1])


@pytest.mark.parametrize("number_format", FORMATS)
def test_one_row_is_multiplied_without_panels_of_floats(number_format):
    """XLA:CPU widens the numbers where it adds their products."""
    kernel = quantized(512, 2048, number_format=number_format, panel_width=128)
    program = jax.jit(multiply_plainly).lower(random_array(1, 512), kernel).compile(AS_FOR_USERS)
    # A panel of floats has 256 KiB.
    assert program.memory_analysis().temp_size_in_bytes < 2**17


@pytest.mark.parametrize("num_rows", [1, 2])
def test_xla_does_not_cut_turns_of_few_rows_into_tasks_for_threads(num_rows):
    """The tasks would take longer than the turn. On one processor, XLA cuts nothing."""
    kernel = quantized(512, 2048, number_format="int8", panel_width=128)
    x = random_array(num_rows, 512)
    program = jax.jit(multiply_plainly).lower(x, kernel).compile(AS_FOR_USERS)
    assert "while(" in program.as_text()
    assert "outer_dimension_partitions" not in program.as_text()


@pytest.mark.parametrize("has_zeros", [False, True])
def test_one_row_is_multiplied_with_every_panel(has_zeros):
    """More panels than a turn of the loop has, and not a multiple of them."""
    rng = np.random.default_rng(0)
    numbers_np = rng.integers(0, 16, (2, 24, 37 * 16), np.uint8)
    zeros_np = rng.integers(0, 16, (2, 37 * 16), np.uint8) if has_zeros else None
    scales = random_array(2, 37 * 16)
    zeros = None if zeros_np is None else jnp.asarray(zeros_np)
    kernel = ScaledKernel.pack(
        jnp.asarray(numbers_np), scales, zeros, number_format="int4", panel_width=16
    )
    assert kernel.num_panels == 37
    x = random_array(1, 48, seed=1)
    assert_near(
        jax.jit(multiply_plainly)(x, kernel), np.asarray(x, np.float64) @ dequantized(kernel)
    )


def test_split_along_inputs_and_outputs():
    kernel = quantized(IN, OUT, number_format="int4", panel_width=None)
    assert kernel.specs(("inner", None)) == (
        PartitionSpec(None, "model", None, None),
        PartitionSpec(None, "model", None),
    )
    assert kernel.specs((None, "inner"))[0] == PartitionSpec(None, None, None, "model")
    panels = quantized(IN, OUT, number_format="int4", panel_width=64)
    assert panels.specs((None, "inner")) == (PartitionSpec(),) * 2


@pytest.mark.parametrize(
    ("in_features", "group_size", "fitting"),
    [(4096, 128, 128), (4096, 32, 32), (96, 128, 32), (48, 128, 16), (40, 128, None)],
)
def test_groups_divide_the_inputs(in_features, group_size, fitting):
    assert fitting_group_size(in_features, group_size) == fitting
