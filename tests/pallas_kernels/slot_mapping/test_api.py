"""Tests of `slot_mapping/api.py`: the checks of arguments and the choice of a body."""

import jax
import jax.export
import jax.numpy as jnp
import pytest

from pallas_kernels.slot_mapping.api import slot_mapping
from tests import on_device

SHAPES = {
    "positions": ((2, 6), jnp.int32),
    "block_tables": ((2, 3, 4), jnp.int32),
    "query_start_loc": ((4,), jnp.int32),
}


def shape_of_result(changes, **options):
    arguments = {
        name: jax.ShapeDtypeStruct(*changes.get(name, shape)) for name, shape in SHAPES.items()
    }
    options = {"block_size": 8, "pad_slot": 100} | options
    return jax.eval_shape(lambda arguments: slot_mapping(**arguments, **options), arguments)


@pytest.mark.parametrize("implementation", [None, "reference", "xla"])
def test_every_implementation_returns_a_slot_for_each_token(implementation):
    result = shape_of_result({}, implementation=implementation)
    assert (result.shape, result.dtype) == ((2, 6), jnp.int32)


@pytest.mark.parametrize(("num_reqs", "max_blocks_per_req"), [(0, 4), (3, 0)])
def test_without_a_block_to_look_up_all_tokens_are_padding(num_reqs, max_blocks_per_req):
    slots = slot_mapping(
        on_device.zeros((2, 6), jnp.int32),
        on_device.zeros((2, num_reqs, max_blocks_per_req), jnp.int32),
        on_device.zeros(num_reqs + 1, jnp.int32),
        block_size=8,
        pad_slot=100,
    )
    assert slots.dtype == jnp.int32
    assert slots.tolist() == [[100] * 6] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"positions": ((6,), jnp.int32)}, r"positions .* wanted \[num_groups, num_tokens\]"),
        ({"positions": ((2, 6), jnp.float32)}, "positions .* got float32, wanted int32"),
        ({"block_tables": ((1, 3, 4), jnp.int32)}, r"block_tables .* got \[1, 3, 4\], wanted \[2"),
        ({"query_start_loc": ((3,), jnp.int32)}, r"query_start_loc .* got \[3\], wanted \[4\]"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result(changes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is too small: got 0, wanted at least 1"),
        ({"pad_slot": -1}, "pad_slot is too small: got -1, wanted at least 0"),
        ({"pad_slot": 2**31}, "pad_slot is too large: got 2147483648, wanted at most"),
        ({"block_size": 2**31}, "block_size is too large: got 2147483648, wanted at most"),
        ({"implementation": "fast"}, "got 'fast', wanted None or one of"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        shape_of_result({}, **options)


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_default_body_lowers_for_accelerators(platform):
    arguments = {name: jax.ShapeDtypeStruct(*shape) for name, shape in SHAPES.items()}
    jitted = jax.jit(lambda arguments: slot_mapping(**arguments, block_size=8, pad_slot=100))
    exported = jax.export.export(jitted, platforms=[platform])(arguments)
    assert exported.platforms == (platform,)
