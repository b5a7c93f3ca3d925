"""Tests of `slot_mapping/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.slot_mapping.api import _BODIES, slot_mapping
from pallas_kernels.slot_mapping.cases import CASES, build_inputs
from pallas_kernels.slot_mapping.reference import slot_mapping_reference
from pallas_kernels.target import Target

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
OPTIONS = {"block_size": 16, "pad_slot": 10_000}


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.slot_mapping import mosaic_gpu

    return mosaic_gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    inputs = build_inputs(case)
    assert mosaic_gpu.misfit(*inputs.arrays, **inputs.options) is None
    got = run_simulated(mosaic_gpu.slot_mapping_mosaic_gpu, *inputs.arrays, **inputs.options)
    wanted = run_jitted(slot_mapping_reference, *inputs.arrays, **inputs.options)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(got, wanted)


def sized(num_tokens=8, num_reqs=3, num_groups=1, max_blocks_per_req=4):
    """Arguments of a body, without their values."""
    return tuple(
        jax.ShapeDtypeStruct(dims, jnp.int32)
        for dims in (
            (num_groups, num_tokens),
            (num_groups, num_reqs, max_blocks_per_req),
            (num_reqs + 1,),
        )
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_tokens": 1, "num_reqs": 1, "max_blocks_per_req": 1},
        {"num_tokens": 8192, "num_reqs": 256, "num_groups": 3, "max_blocks_per_req": 512},
        {"num_tokens": 131_072, "num_reqs": 1024},
    ],
    ids=str,
)
def test_lowers_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    text = lower_for_cuda(mosaic_gpu.slot_mapping_mosaic_gpu, *sized(**sizes), **OPTIONS)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_tokens": 0}, "an array is empty"),
        ({"num_reqs": 0}, "an array is empty"),
        ({"num_groups": 65_536}, "at most 65535 groups"),
        ({"num_reqs": 2**16, "max_blocks_per_req": 2**15}, "indices are int32"),
    ],
    ids=str,
)
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(sizes, reason, mosaic_gpu):
    arguments = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arguments, **OPTIONS)
    assert preferred_body("slot_mapping", _BODIES, H200, *arguments, **OPTIONS) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    text = lower_for_cuda(slot_mapping, *sized(), **OPTIONS, target=H200)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.slow
@given(data=st.data())
def test_any_batch_equals_reference(run_jitted, data):
    from pallas_kernels.slot_mapping import mosaic_gpu

    num_reqs, num_tokens, max_blocks_per_req, block_size = 3, 12, 4, 4
    options = {"block_size": block_size, "pad_slot": 10_000}
    ends = sorted(data.draw(st.tuples(*[st.integers(0, num_tokens)] * num_reqs)))
    position = st.integers(0, max_blocks_per_req * block_size - 1)
    positions = data.draw(st.lists(position, min_size=num_tokens, max_size=num_tokens))
    positions[ends[-1] :] = [-(2**31)] * (num_tokens - ends[-1])  # padding holds anything
    tables = np.random.default_rng(0).permutation(100)[: num_reqs * max_blocks_per_req]
    arrays = (
        jnp.array([positions], jnp.int32),
        jnp.array(tables.reshape(1, num_reqs, max_blocks_per_req), jnp.int32),
        jnp.array([0, *ends], jnp.int32),
    )
    got = run_jitted(mosaic_gpu.slot_mapping_mosaic_gpu, *arrays, **options, interpret=True)
    np.testing.assert_array_equal(got, slot_mapping_reference(*arrays, **options))
