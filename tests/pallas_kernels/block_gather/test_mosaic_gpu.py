"""Tests of `block_gather/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_gather.api import _BODIES, block_gather
from pallas_kernels.block_gather.cases import CASES, build_inputs
from pallas_kernels.block_gather.reference import block_gather_reference
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.target import Target
from tests.pallas_kernels.block_gather.block_sizes import FITTING, SLOW_FITTING, UNFIT
from tests.quick_compile import marked_sizes, slow_unless_named

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.block_gather import mosaic_gpu

    return mosaic_gpu


QUICK_CASES = (
    "one_block_one_row",
    "some_with_padding",
    "padding_only",
    "raw_words",
    "latents",
    "uint16_words",
    "int8",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.pages, inputs.block_ids
    assert mosaic_gpu.misfit(*arguments) is None
    got = run_simulated(mosaic_gpu.block_gather_mosaic_gpu, *arguments)
    wanted = run_jitted(block_gather_reference, *arguments)
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def sized(num_ids=4, block_dims=(2, 8, 16, 128), dtype="bfloat16"):
    """Arguments of a body, without their values; 2 rows x 10 blocks, by default of K and V."""
    pages = jax.ShapeDtypeStruct((2, 10, *block_dims), dtype)
    return pages, jax.ShapeDtypeStruct((num_ids,), jnp.int32)


@pytest.mark.parametrize("sizes", marked_sizes(FITTING, slow=SLOW_FITTING), ids=str)
def test_lowers_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    text = lower_for_cuda(mosaic_gpu.block_gather_mosaic_gpu, *sized(**sizes))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(("sizes", "reason"), UNFIT, ids=str)
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(sizes, reason, mosaic_gpu):
    arguments = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arguments)
    assert preferred_body("block_gather", _BODIES, H200, *arguments) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    assert lower_for_cuda(block_gather, *sized(), target=H200).count("@mosaic_gpu") == 1
