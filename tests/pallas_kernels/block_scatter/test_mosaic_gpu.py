"""Tests of `block_scatter/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_scatter.api import _BODIES, block_scatter
from pallas_kernels.block_scatter.cases import CASES, build_inputs
from pallas_kernels.block_scatter.reference import block_scatter_reference
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.target import Target
from tests.quick_compile import marked_sizes

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.block_scatter import mosaic_gpu

    return mosaic_gpu


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    inputs = build_inputs(case)
    caches, blocks = (inputs.k_cache, inputs.v_cache), (inputs.k_blocks, inputs.v_blocks)
    arguments = (*caches, *blocks, inputs.block_ids)
    assert mosaic_gpu.misfit(*arguments) is None
    got = run_simulated(mosaic_gpu.block_scatter_mosaic_gpu, *arguments)
    wanted = run_jitted(block_scatter_reference, *arguments)
    for got_cache, wanted_cache in zip(got, wanted, strict=True):
        assert got_cache.dtype == wanted_cache.dtype
        np.testing.assert_array_equal(np.asarray(got_cache), np.asarray(wanted_cache))


def sized(
    num_ids=4, num_kv_heads=8, block_size=16, head_dim=128, v_head_dim=None, dtype="bfloat16"
):
    """Arguments of a body, without their values; the cache has 2 rows x 10 blocks."""
    arrays = (
        jax.ShapeDtypeStruct((2, num_blocks, num_kv_heads, block_size, width), dtype)
        for num_blocks in (10, num_ids)
        for width in (head_dim, head_dim if v_head_dim is None else v_head_dim)
    )
    return *arrays, jax.ShapeDtypeStruct((num_ids,), jnp.int32)


# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"block_size": 8, "head_dim": 64, "dtype": "float32"},
    {"block_size": 64, "head_dim": 96, "dtype": "float16"},
    {"block_size": 256, "head_dim": 192, "dtype": "int8"},
    {"num_ids": 100_000, "head_dim": 256, "dtype": "float8_e4m3fn"},
    {"num_kv_heads": 1, "block_size": 8, "head_dim": 80},
    {"num_kv_heads": 1, "block_size": 64, "head_dim": 576, "v_head_dim": 512},
    {"num_kv_heads": 1, "head_dim": 576, "v_head_dim": 0},
]
SLOW_FITTING = [
    *({"block_size": block_size} for block_size in (8, 64, 256)),
    *({"head_dim": head_dim} for head_dim in (64, 80, 96, 192, 256)),
    *({"dtype": dtype} for dtype in ("float32", "float16", "int8", "float8_e4m3fn")),
    {"num_ids": 100_000},
]


@pytest.mark.parametrize(
    "sizes",
    marked_sizes(FITTING[-2:], thorough=FITTING[:-2], slow=SLOW_FITTING),
    ids=str,
)
def test_lowers_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    text = lower_for_cuda(mosaic_gpu.block_scatter_mosaic_gpu, *sized(**sizes))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_ids": 0}, "there is nothing to copy"),
        ({"dtype": "int32"}, "got int32"),
        ({"num_kv_heads": 1, "block_size": 1, "head_dim": 64}, "cannot be cut into TMA boxes"),
    ],
    ids=str,
)
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(sizes, reason, mosaic_gpu):
    arguments = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arguments)
    assert preferred_body("block_scatter", _BODIES, H200, *arguments) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    assert lower_for_cuda(block_scatter, *sized(), target=H200).count("@mosaic_gpu") == 1
