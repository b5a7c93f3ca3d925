"""Kernels in panels hold the same numbers and have the same products; nothing else is touched."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models import LoadedModel
from models.errors import ModelError
from models.layers.linear import Linear
from models.loading import column_panels
from models.loading.column_panels import split_columns
from models.loading.load_model import load_model
from models.loading.product_dtype import with_product_dtype
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import PagedStepper

KERNEL = "layers.0.mlp.up_proj.kernel"
TOLERANCE = 1e-5  # of the largest absolute number
# Wide enough for panels, but for those of keys and values: 256 columns.
SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "vocab_size": 1024,
    "num_q_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "num_layers": 2,
}


def random_array(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), dtype)


def in_panels(kernel: jax.Array) -> jax.Array:
    params = [kernel]
    split_columns(params, [KERNEL])
    return params[0]


def by_name(model: LoadedModel) -> dict[str, jax.Array]:
    return dict(zip(model.param_names, model.params, strict=True))


@pytest.mark.parametrize(
    ("out_features", "num_panels", "width"),
    [(512, 2, 256), (1024, 4, 256), (640, 5, 128), (576, 9, 64)],
)
@pytest.mark.parametrize("max_host_turn", [0, 2**20])
def test_panels_side_by_side_are_the_kernel(
    monkeypatch, out_features, num_panels, width, max_host_turn
):
    monkeypatch.setattr(column_panels, "_MAX_HOST_TURN", max_host_turn)
    kernel = random_array(48, out_features)
    panels = in_panels(kernel)
    assert (panels.shape, panels.dtype) == ((num_panels, 48, width), jnp.float32)
    np.testing.assert_array_equal(np.concatenate(list(panels), axis=1), kernel)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        (KERNEL, (8, 448), "float32"),  # narrow, though 64 divides it
        (KERNEL, (8, 1000), "float32"),
        (KERNEL, (8, 1024), "bfloat16"),
        ("layers.0.mlp.up_proj.kernel_scale", (1024,), "float32"),
        ("layers.0.mlp.up_proj.bias", (1024,), "float32"),
        ("embed_tokens.embedding", (8, 1024), "float32"),
        ("norm.scale", (1024,), "float32"),
    ],
)
def test_what_is_not_split_stays_the_same_array(name, shape, dtype):
    array = random_array(*shape, dtype=dtype)
    params = [array]
    split_columns(params, [name])
    assert params[0] is array


def test_kernels_are_replaced_one_at_a_time(monkeypatch):
    """There is never a second copy of the model."""
    params = [random_array(8, 512) for _ in range(3)]
    whole = [weakref.ref(kernel) for kernel in params]
    num_whole = []

    def split(kernel: jax.Array) -> jax.Array:
        num_whole.append(sum(kernel() is not None for kernel in whole))
        return in_panels_of(kernel)

    in_panels_of = column_panels._in_panels
    monkeypatch.setattr(column_panels, "_in_panels", split)
    split_columns(params, [KERNEL] * 3)
    assert num_whole == [3, 2, 1]


@pytest.mark.parametrize("num_tokens", [1, 2, 17])
def test_products_are_those_of_the_kernel(num_tokens):
    linear = Linear(48, 640, use_bias=True, dtype=jnp.float32)
    linear.kernel[...] = random_array(48, 640)
    linear.bias[...] = random_array(640)
    x = random_array(num_tokens, 48)
    product, out = linear.product(x), linear(x)
    linear.kernel = nnx.Param(in_panels(linear.kernel[...]))
    assert linear.kernel[...].shape == (5, 48, 128)
    for got, wanted in ((linear.product(x), product), (linear(x), out)):
        assert (got.shape, got.dtype) == ((num_tokens, 640), jnp.float32)
        np.testing.assert_allclose(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("tie", "loops_over_layers"), [(False, False), (True, False), (False, True)]
)
def test_logits_are_those_of_whole_kernels(tmp_path, tie, loops_over_layers):
    folder = write_random_checkpoint(tmp_path, **SHAPE, tie=tie, bias=True, std=0.04)
    models = [load_model(folder, dtype="float32", has_column_panels=has) for has in (False, True)]
    whole, split = map(by_name, models)
    for name, array in whole.items():
        is_wide = name.endswith(".kernel") and array.shape[1] >= 512
        assert split[name].ndim == (3 if is_wide else array.ndim), name
        if not is_wide:
            np.testing.assert_array_equal(split[name], array)
    assert split["layers.1.mlp.down_proj.kernel"].shape == (2, 1024, 256)
    specs = dict(zip(models[1].param_names, models[1].param_specs, strict=True))
    assert specs["layers.1.mlp.down_proj.kernel"] == PartitionSpec(None, "model", None)
    kernels = dataclasses.replace(models[0].kernels, loops_over_layers=loops_over_layers)
    steppers = [PagedStepper(model.with_kernels(kernels)) for model in models]
    for chunk in ({0: [3, 4, 5, 6], 1: list(range(7, 30)), 2: [8]}, {0: [9], 2: [10]}):
        wanted, got = (stepper.step(chunk) for stepper in steppers)
        for row in chunk:
            assert np.abs(got[row] - wanted[row]).max() <= TOLERANCE * np.abs(wanted[row]).max()


@pytest.mark.parametrize(
    "other", [{"product_dtype": "int8"}, {"product_dtype": "bfloat16"}, {"dtype": "bfloat16"}]
)
def test_kernels_of_fewer_bits_stay_whole(tmp_path, other):
    folder = write_random_checkpoint(tmp_path, **SHAPE | {"num_layers": 1})
    model = load_model(folder, **{"dtype": "float32"} | other, has_column_panels=True)
    # A kernel of int8 is turned besides.
    wanted = (1024, 512) if "int8" in other.values() else (512, 1024)
    assert by_name(model)[KERNEL].shape == wanted
    assert all(array.ndim <= 2 for array in model.params)


def test_kernels_in_panels_are_not_rounded(tmp_path):
    checkpoint = write_random_checkpoint(tmp_path, **SHAPE)
    model = load_model(checkpoint, has_column_panels=True)
    with pytest.raises(ModelError, match=r"a kernel is \(\d, \d+, 256\); wanted \[in, out\]"):
        with_product_dtype(model, "int8")
