"""Kernels in panels hold the same numbers and have the same products; nothing else is touched."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from models import LoadedModel
from models.layers.linear import Linear
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_model import load_model
from models.platforms.cpu import CPU
from models.platforms.huge_pages import HUGE_PAGE_BYTES
from models.stored_kernels.column_panels import PanelKernel
from tests.compiler_flags import AS_FOR_USERS
from tests.models.plain_context import plain_context
from tests.models.steppers import IN_TURN
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import PagedStepper

KERNEL = "layers.0.mlp.up_proj.kernel"
TOLERANCE = 1e-5  # of the largest absolute number
# Wide enough for panels, except kernels of keys and values, which have 256 columns.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 768,
    "vocab_size": 512,
    "num_q_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "num_layers": 2,
}


def random_array(*shape: int, dtype: str = "float32") -> jax.Array:
    # `jnp.asarray` would compile a program for each shape.
    return jax.device_put(np.random.default_rng(0).standard_normal(shape).astype(jnp.dtype(dtype)))


def in_panels(kernel: jax.Array, width: int = 256) -> tuple[jax.Array, ...]:
    return PanelKernel.of(kernel, width).panels


def by_name(model: LoadedModel) -> dict[str, jax.Array]:
    return dict(zip(model.param_names, model.params, strict=True))


@pytest.mark.parametrize(
    ("out_features", "width", "widths"),
    [
        (512, 256, [256, 256]),
        (1024, 512, [512, 512]),
        (640, 256, [256, 256, 128]),
        (513, 256, [256, 256, 1]),
        (256, 64, [64] * 4),
    ],
)
def test_panels_side_by_side_are_the_kernel(out_features, width, widths):
    kernel = random_array(48, out_features)
    panels = in_panels(kernel, width)
    assert [(panel.shape, panel.dtype) for panel in panels] == [
        ((48, wanted), jnp.float32) for wanted in widths
    ]
    np.testing.assert_array_equal(np.concatenate(panels, axis=1), kernel)


@pytest.mark.parametrize(
    ("out_features", "num_panels", "width"), [(512, 64, 8), (513, 33, 16), (2000, 63, 32)]
)
def test_a_very_wide_kernel_has_wider_panels(out_features, num_panels, width):
    """Each is time to compile."""
    panels = in_panels(random_array(2, out_features), 8)
    assert (len(panels), panels[0].shape) == (num_panels, (2, width))


def test_a_deleted_panel_does_not_delete_others():
    kernel = random_array(512, 1024)
    first, *others = in_panels(kernel)
    first.delete()
    np.testing.assert_array_equal(np.concatenate(others, axis=1), kernel[:, 256:])


@pytest.mark.parametrize("num_tokens", [16, 512])
def test_panels_need_no_more_memory_than_their_product_once_more(num_tokens):
    linear = Linear(64, 1024, use_bias=False, dtype=jnp.float32)
    linear.kernel.set_value(PanelKernel.of(random_array(64, 1024), 256))
    program = jax.jit(linear.product).lower(jnp.zeros((num_tokens, 64))).compile(AS_FOR_USERS)
    memory = program.memory_analysis()
    assert memory.temp_size_in_bytes <= memory.output_size_in_bytes


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="panels are for CPUs")
def test_panels_of_a_kernel_are_one_piece_of_memory():
    """So they can lie in huge pages, which are larger than most panels."""
    panels = in_panels(random_array(512, 1000), 256)
    starts = [panel.unsafe_buffer_pointer() for panel in panels]
    assert starts[0] % HUGE_PAGE_BYTES == 0
    assert np.diff(starts).tolist() == [panel.nbytes for panel in panels[:-1]]


@pytest.mark.parametrize(
    ("layout", "shape", "dtype"),
    [
        ("matrix", (8, 511), "float32"),  # narrow
        ("matrix", (8, 1024), "bfloat16"),
        ("vector", (1024,), "float32"),
        ("table", (8, 1024), "float32"),
        # Any other layout has columns elsewhere.
        ("experts", (4, 8, 1024), "float32"),
    ],
)
def test_what_is_not_split_stays_the_same_array(layout, shape, dtype):
    array = random_array(*shape, dtype=dtype)
    encoder = KernelEncoder(platform=IN_TURN, product_dtype="auto", panel_width=256)
    assert encoder.encode(array, layout, is_router=False) is array


def test_kernels_are_replaced_one_at_a_time(tmp_path, monkeypatch):
    """There is never a second copy of the model."""
    whole = []
    num_whole = []

    def split(kernel: jax.Array, width: int) -> PanelKernel | None:
        panels = panels_of(kernel, width)
        if panels is not None:
            whole.append(weakref.ref(kernel))
            num_whole.append(sum(kernel() is not None for kernel in whole))
        return panels

    panels_of = PanelKernel.of
    monkeypatch.setattr(PanelKernel, "of", split)
    load_model(write_random_checkpoint(tmp_path, **SHAPE), dtype="float32", panel_width=256)
    assert num_whole == [1] * 11  # of two layers and the head; those of keys and values are narrow


@pytest.mark.parametrize(("num_tokens", "use_bias"), [(1, True), (2, False), (17, True)])
def test_products_equal_the_kernels(num_tokens, use_bias):
    linear = Linear(48, 640, use_bias=use_bias, dtype=jnp.float32)
    linear.kernel[...] = random_array(48, 640)
    if use_bias:
        linear.bias[...] = random_array(640)
    x = random_array(num_tokens, 48)
    context = plain_context(num_tokens)

    def results() -> tuple[jax.Array, jax.Array]:
        return jax.jit(lambda x: (linear.product(x), linear(x, context)))(x)

    of_whole = results()
    linear.kernel.set_value(PanelKernel.of(linear.kernel[...], 256))
    for got, wanted in zip(results(), of_whole, strict=True):
        assert (got.shape, got.dtype) == ((num_tokens, 640), jnp.float32)
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("tie", "loops_over_layers"), [(True, False), (False, True)])
def test_logits_equal_whole_kernels(tmp_path, tie, loops_over_layers):
    num_layers = 2 if loops_over_layers else 1
    shape = SHAPE | {"num_layers": num_layers}
    folder = write_random_checkpoint(tmp_path, **shape, tie=tie, bias=True, std=0.04)
    # One whose tied head reads the embedding as it is stored, whichever processor runs the test.
    platform = CPU(num_threads=2, instruction_sets=frozenset({"avx2", "avx512f"}))
    models = [
        load_model(folder, dtype="float32", panel_width=width, platform=platform)
        for width in (None, 256)
    ]
    whole, split = map(by_name, models)
    for name, array in whole.items():
        if name.endswith(".kernel") and array.shape[1] >= 512:
            panels = [split.pop(f"{name}.panels.{idx}") for idx in range(array.shape[1] // 256)]
            np.testing.assert_array_equal(np.concatenate(panels, axis=1), array)
        else:
            np.testing.assert_array_equal(split.pop(name), array)
    # With panels, a tied head has an array of its own.
    heads = {name.rpartition(".")[0] for name in split}
    assert heads == ({"lm_head.kernel.panels"} if tie else set())
    specs = dict(zip(models[1].param_names, models[1].param_specs, strict=True))
    assert specs[f"layers.{num_layers - 1}.mlp.down_proj.kernel.panels.1"] == PartitionSpec()
    platform = platform if loops_over_layers else IN_TURN
    steppers = [PagedStepper(dataclasses.replace(model, platform=platform)) for model in models]
    for chunk in ({0: [3, 4, 5, 6], 1: list(range(7, 30)), 2: [8]}, {0: [9], 2: [10]}):
        wanted, got = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


@pytest.mark.parametrize(
    "other", [{"product_dtype": "int8"}, {"product_dtype": "bfloat16"}, {"dtype": "bfloat16"}]
)
def test_kernels_of_fewer_bits_stay_whole(tmp_path, other):
    folder = write_random_checkpoint(tmp_path, **SHAPE | {"num_layers": 1})
    model = load_model(folder, **{"dtype": "float32"} | other, panel_width=256)
    kernel = model.parameters[KERNEL]
    assert kernel.shape == (512, 768)
    assert not isinstance(kernel, PanelKernel)
