"""Tests of `kv_scatter/mosaic_gpu.py`, simulated and lowered: no GPU is needed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pallas_kernels.cache_layout import pad_slot
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.kv_scatter.api import _BODIES, kv_scatter
from pallas_kernels.kv_scatter.cases import CASES, build_inputs
from pallas_kernels.kv_scatter.reference import kv_scatter_reference
from pallas_kernels.target import Target
from tests.quick_compile import marked_sizes, slow_unless_named

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.kv_scatter import mosaic_gpu

    return mosaic_gpu


def assert_caches_equal(got, wanted):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


# Only the CPU stores 16-bit floats as uint16.
GPU_CASES = [case for case in CASES if not case.is_uint16]
QUICK_CASES = ("block_64_head_dim_128", "mla_without_v", "padding_only", "bfloat16")


@pytest.mark.parametrize("case", slow_unless_named(GPU_CASES, *QUICK_CASES))
def test_equals_reference(case, mosaic_gpu, run_simulated, run_jitted):
    arguments = build_inputs(case).body_arguments
    assert mosaic_gpu.misfit(*arguments) is None
    # 16 tokens in tiles of 6: the last tile leaves what the one before it wrote.
    tile_tokens = min(6, arguments[3].size)
    got = run_simulated(mosaic_gpu.kv_scatter_mosaic_gpu, *arguments, tile_tokens=tile_tokens)
    assert_caches_equal(got, run_jitted(kv_scatter_reference, *arguments))


@pytest.mark.parametrize("tile_tokens", [5, None])
def test_any_tile_equals_reference(tile_tokens, mosaic_gpu, run_simulated, run_jitted):
    arguments = build_inputs(CASES[0]).body_arguments
    got = run_simulated(mosaic_gpu.kv_scatter_mosaic_gpu, *arguments, tile_tokens=tile_tokens)
    assert_caches_equal(got, run_jitted(kv_scatter_reference, *arguments))


def sized(num_tokens=8, num_kv_heads=2, head_dim=64, has_v=True, dtype="bfloat16"):
    """Arguments of a body, without their values; the cache of 2 rows x 10 blocks x 16 tokens."""
    cache_dims = (2, 10 * (2 if has_v else 1), num_kv_heads, 16, head_dim)
    k = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), dtype)
    slots = jax.ShapeDtypeStruct((num_tokens,), jnp.int32)
    row = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct(cache_dims, dtype), k, k if has_v else None, slots, row


# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"head_dim": 64, "dtype": "float32", "num_tokens": 1},
    {"head_dim": 96, "dtype": "float16", "num_tokens": 1000},
    {"head_dim": 192, "num_kv_heads": 16},
    {"head_dim": 256, "num_kv_heads": 8, "num_tokens": 8192},
    {"head_dim": 128, "num_kv_heads": 8, "num_tokens": 131_072},
    {"num_kv_heads": 1, "head_dim": 80},
    {"num_kv_heads": 1, "head_dim": 576},
    {"num_kv_heads": 1, "head_dim": 576, "has_v": False},
]
SLOW_FITTING = [
    *({"head_dim": head_dim} for head_dim in (64, 80, 96, 128, 192, 256)),
    *({"dtype": dtype} for dtype in ("float32", "float16")),
    {"num_kv_heads": 8, "head_dim": 128, "num_tokens": 8192},
    {"num_tokens": 1},
    {"num_tokens": 1000},
]


@pytest.mark.parametrize("sizes", marked_sizes(FITTING, slow=SLOW_FITTING), ids=str)
def test_lowers_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    arguments = sized(**sizes)
    assert mosaic_gpu.misfit(*arguments) is None
    text = lower_for_cuda(mosaic_gpu.kv_scatter_mosaic_gpu, *arguments)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"num_tokens": 0}, "there is nothing to write"),
        ({"num_kv_heads": 257, "head_dim": 16}, "at most 256 heads, got num_kv_heads=257"),
        ({"head_dim": 20}, "a multiple of 16 bytes for TMA, got head_dim=20 of bfloat16"),
        ({"dtype": "float64"}, "got float64"),
        ({"dtype": "uint16"}, "16-bit floats stored as uint16"),
        ({"num_kv_heads": 64, "head_dim": 256}, "a token must fit 32768 bytes"),
    ],
    ids=str,
)
def test_what_does_not_fit_has_a_reason_and_runs_as_xla(sizes, reason, mosaic_gpu):
    arguments = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arguments)
    assert preferred_body("kv_scatter", _BODIES, H200, *arguments) == "xla"


def test_a_gpu_runs_the_kernel_by_itself(lower_for_cuda):
    text = lower_for_cuda(kv_scatter, *sized(), target=H200)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    ("num_tokens", "token_bytes", "wanted"),
    [
        (1, 4096, 1),
        (132, 4096, 1),  # a token for each SM
        (256, 4096, 2),
        (8192, 4096, 8),  # 32 KiB
        (8192, 256, 16),
    ],
)
def test_tiles_fill_the_gpu_before_they_grow(mosaic_gpu, num_tokens, token_bytes, wanted):
    assert mosaic_gpu._tile_tokens(num_tokens, token_bytes) == wanted


@pytest.mark.slow
@given(data=st.data())
def test_any_slots_equal_reference(data):
    from pallas_kernels.kv_scatter import mosaic_gpu

    num_rows, num_blocks, block_size, num_tokens = 2, 3, 8, 5
    tile_tokens = data.draw(st.sampled_from([1, 2, 5]))
    num_slots = num_blocks * block_size
    padding = pad_slot(num_rows, num_blocks, block_size)
    slot = st.one_of(st.integers(0, num_slots - 1), st.integers(padding, 2**31 - 1))
    slots = data.draw(st.lists(slot, min_size=num_tokens, max_size=num_tokens, unique=True))
    rng = np.random.default_rng(0)
    cache_dims = (num_rows, 2 * num_blocks, 2, block_size, 16)
    kv_cache = jnp.asarray(rng.standard_normal(cache_dims), jnp.float32)
    k = jnp.asarray(rng.standard_normal((num_tokens, 2, 16)), jnp.float32)
    row = jnp.int32(data.draw(st.integers(0, num_rows - 1)))
    arguments = kv_cache, k, -k, jnp.array(slots, jnp.int32), row
    jitted = _JITTED.setdefault(
        tile_tokens,
        jax.jit(
            functools.partial(
                mosaic_gpu.kv_scatter_mosaic_gpu, tile_tokens=tile_tokens, interpret=True
            )
        ),
    )
    assert_caches_equal(jitted(*arguments), kv_scatter_reference(*arguments))


_JITTED = {}  # tile_tokens -> the compiled body: hypothesis calls the test many times
