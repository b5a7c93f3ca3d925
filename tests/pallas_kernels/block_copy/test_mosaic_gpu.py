"""Tests of `block_copy/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.block_copy.api import _BODIES, block_copy
from pallas_kernels.block_copy.cases import CASES, build_inputs
from pallas_kernels.block_copy.reference import block_copy_reference
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.target import Target
from pallas_kernels.tma_boxes import COPYABLE_DTYPES
from tests.quick_compile import marked_sizes, slow_unless_named

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.block_copy import mosaic_gpu

    return mosaic_gpu


def assert_pages_equal(got, wanted):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


QUICK_CASES = (
    "swap",
    "zeros_and_one_source_for_many",
    "every_block",
    "padding_only",
    "raw_words",
    "bfloat16",
    "uint16_words",
)


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    inputs = build_inputs(case)
    arguments = inputs.pages, inputs.source_block_ids, inputs.target_block_ids
    assert mosaic_gpu.misfit(*arguments) is None
    got = run_simulated(mosaic_gpu.block_copy_mosaic_gpu, *arguments)
    assert_pages_equal(got, run_jitted(block_copy_reference, *arguments))


def test_many_copies_in_small_chunks_equal_reference(mosaic_gpu, run_simulated, run_jitted):
    # 20 copies are wanted in 2 KiB a chunk; a block has 8 KiB.
    rng = np.random.default_rng(0)
    pages = jnp.asarray(rng.standard_normal((1, 30, 2, 8, 128)), jnp.float32)
    sources = jnp.asarray(rng.integers(0, 30, 20), jnp.int32)
    targets = jnp.asarray(rng.permutation(30)[:20], jnp.int32).at[7].set(30)
    arguments = pages, sources, targets
    assert mosaic_gpu._chunk_bytes(20) == (2048, 4096, 8192, 11_468)
    got = run_simulated(mosaic_gpu.block_copy_mosaic_gpu, *arguments)
    assert_pages_equal(got, run_jitted(block_copy_reference, *arguments))


def sized(num_copies=8, block_dims=(2, 8, 16, 128), dtype="bfloat16"):
    """Arguments of a body, without their values; 2 rows x 10 blocks, by default of K and V."""
    pages = jax.ShapeDtypeStruct((2, 10, *block_dims), dtype)
    ids = jax.ShapeDtypeStruct((num_copies,), jnp.int32)
    return pages, ids, ids


# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"num_copies": 1, "block_dims": (2, 8, 16, 64), "dtype": "float32"},
    {"num_copies": 64, "block_dims": (2, 8, 16, 96), "dtype": "float16"},
    {"num_copies": 112, "block_dims": (2, 8, 16, 192), "dtype": "int8"},
    {"num_copies": 448, "block_dims": (2, 8, 16, 256), "dtype": "float8_e4m3fn"},
    {"block_dims": (2, 1, 8, 80)},
    {"block_dims": (2 * 8 * 16 * 128,), "dtype": "uint16"},
    {"block_dims": (16, 576)},
]
SLOW_FITTING = [
    *({"num_copies": num_copies} for num_copies in (1, 64, 112, 448)),
    *({"block_dims": (2, 8, 16, head_dim)} for head_dim in (64, 80, 96, 192, 256)),
    *({"dtype": dtype} for dtype in COPYABLE_DTYPES),
]


@pytest.mark.parametrize("sizes", marked_sizes(FITTING, slow=SLOW_FITTING), ids=str)
def test_lowers_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    text = lower_for_cuda(mosaic_gpu.block_copy_mosaic_gpu, *sized(**sizes))
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_copies": 0}, "there is nothing to copy"),
        ({"num_copies": 1000}, "at most 229 bytes (for 1000 block ids)"),
        ({"dtype": "bool"}, "got bool"),
        ({"block_dims": (64,)}, "cannot be cut into TMA boxes"),
    ],
    ids=str,
)
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(sizes, reason, mosaic_gpu):
    arguments = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arguments)
    assert preferred_body("block_copy", _BODIES, H200, *arguments) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    assert lower_for_cuda(block_copy, *sized(), target=H200).count("@mosaic_gpu") == 1


@pytest.mark.slow
@given(data=st.data())
def test_any_copies_equal_numpy_that_reads_first(data):
    num_rows, num_blocks, num_copies = 2, 6, 5
    ids = st.lists(st.integers(0, 12), min_size=num_copies, max_size=num_copies, unique=True)
    targets = np.array(data.draw(ids), np.int32)
    block = st.lists(st.integers(0, num_blocks - 1), min_size=num_copies, max_size=num_copies)
    sources = np.array(data.draw(block), np.int32)
    pages = np.arange(num_rows * num_blocks * 128, dtype=np.float32)
    pages = pages.reshape(num_rows, num_blocks, 128)
    expected = pages.copy()
    is_real = targets < num_blocks
    expected[:, targets[is_real]] = pages[:, sources[is_real]]
    np.testing.assert_array_equal(_copy_simulated(pages, sources, targets), expected)


@jax.jit
def _copy_simulated(*arguments):  # one compilation for all that hypothesis draws
    return block_copy(*arguments, implementation="mosaic_gpu_interpret")
