"""Tests of `latent_attention/mosaic_gpu.py`, simulated and lowered: no GPU is needed.

The simulation knows no registers, no swizzling and no products of tensor cores, but barriers,
copies, and who reads what another writes.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU, preferred_body
from pallas_kernels.latent_attention.api import _BODIES
from pallas_kernels.latent_attention.cases import LatentAttentionCase, build_inputs
from pallas_kernels.latent_attention.tuned_blocks import DEFAULT_CONFIG, LatentDecodeConfig
from pallas_kernels.target import Target

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
H200 = Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.latent_attention import mosaic_gpu

    return mosaic_gpu


def few_shares(num_shares, min_share=1):
    return LatentDecodeConfig(
        num_sms=num_shares, min_share=min_share, merge_columns=32, merge_batch=3
    )


def small(name, *requests, **sizes):
    """Narrow latents, because simulating takes its time; bfloat16 and a true rotary width."""
    defaults = {"latent_dim": 128, "rope_dim": 64, "num_q_heads": 4, "dtype": "bfloat16"}
    return LatentAttentionCase(name=name, requests=requests, **(defaults | sizes))


# Tiles are 64 tokens. A quick run takes the cases that differ most; slow tests take the rest.
SIMULATED = [
    # 3 + 0 + 1 + 2 + 0 + 4 tiles in 3 shares of 4: the third and the last request are cut.
    (small("ragged", (1, 130), (0, 0), (1, 9), (1, 65), (0, 40), (1, 200)), few_shares(3)),
    # Plain XLA computes the prompts, and the kernels leave their rows as they are.
    (small("prompts_between_decodes", (1, 70), (5, 90), (0, 0), (1, 9), (3, 3)), few_shares(2)),
    # 8 tiles, one a share: the merge reads 3 parts, 3 parts, 1 and 1.
    (small("one_request", (1, 500), block_size=128, num_padding_tokens=0), few_shares(8)),
]
SIMULATED_SLOWLY = [
    (
        small("two_head_tiles", (1, 100), (1, 64), block_size=64, num_q_heads=72, dtype="float16"),
        few_shares(4),
    ),
    (small("sums_of_two_widths", (1, 129), (1, 1), latent_dim=384, block_size=32), few_shares(2)),
    (small("whole_requests", (1, 64), (1, 3), (1, 128), block_size=8), few_shares(1)),
    (small("padding_only", (0, 0), (0, 70), (1, 0), num_padding_tokens=3), DEFAULT_CONFIG),
    (small("default_shares", (1, 600), (1, 10), block_size=256), DEFAULT_CONFIG),
    (
        small("deepseek", (1, 200), (1, 70), latent_dim=512, num_q_heads=16, scale=192**-0.5),
        few_shares(2),
    ),
]


def check_simulated(case, config, mosaic_gpu, run_simulated, attend_by_reference):
    inputs = build_inputs(case)
    arguments = (*inputs.arrays[:3], jnp.int32(inputs.row), *inputs.arrays[4:])
    assert mosaic_gpu.misfit(*arguments, **inputs.rules) is None
    pair = run_simulated(
        mosaic_gpu.latent_attention_mosaic_gpu, *arguments, **inputs.rules, config=config
    )
    out, lse = (np.asarray(array).astype(np.float32) for array in pair)
    wanted_out, wanted_lse = attend_by_reference(case)
    # Weights are rounded to the cache's dtype before they meet the values.
    tolerance = {"bfloat16": 2e-2, "float16": 3e-3}[case.dtype]
    np.testing.assert_allclose(out, wanted_out, atol=tolerance, rtol=tolerance)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("case", "config"), SIMULATED, ids=lambda x: getattr(x, "name", ""))
def test_equals_reference_without_races(
    case, config, mosaic_gpu, run_simulated, attend_by_reference
):
    check_simulated(case, config, mosaic_gpu, run_simulated, attend_by_reference)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "config"), SIMULATED_SLOWLY, ids=lambda x: getattr(x, "name", ""))
def test_more_cases_equal_reference_without_races(
    case, config, mosaic_gpu, run_simulated, attend_by_reference
):
    check_simulated(case, config, mosaic_gpu, run_simulated, attend_by_reference)


def sized(
    num_q_heads=64,
    latent_dim=512,
    rope_dim=64,
    num_unused_columns=0,
    block_size=64,
    dtype="bfloat16",
    q_dtype=None,
    max_query_len=1,
):
    """Arguments of a body, without their values, and its keyword arguments."""
    width, num_reqs = latent_dim + rope_dim + num_unused_columns, 64
    int32 = lambda *dims: jax.ShapeDtypeStruct(dims, jnp.int32)  # noqa: E731
    arrays = (
        *(
            jax.ShapeDtypeStruct((num_reqs + 1, num_q_heads, dim), q_dtype or dtype)
            for dim in (latent_dim, rope_dim)
        ),
        jax.ShapeDtypeStruct((2, 8192, 1, block_size, width), dtype),
        *(int32(), int32(num_reqs, 8192 // block_size), int32(num_reqs), int32(num_reqs + 1)),
    )
    return arrays, {"scale": 192**-0.5, "kv_dtype": None, "max_query_len": max_query_len}


FITTING = [
    {"block_size": 8},
    {"num_q_heads": 128, "block_size": 256, "max_query_len": None},
    {"latent_dim": 384, "num_q_heads": 1, "dtype": "float16"},
    *(
        pytest.param(sizes, marks=pytest.mark.slow)
        for sizes in (
            *({"block_size": block_size} for block_size in (16, 32, 64, 128)),
            *({"latent_dim": latent_dim} for latent_dim in (128, 256)),
        )
    ),
]


@pytest.mark.parametrize("sizes", FITTING, ids=str)
def test_both_kernels_lower_for_cuda(sizes, mosaic_gpu, lower_for_cuda):
    arrays, rules = sized(**sizes)
    assert preferred_body("latent_attention", _BODIES, H200, *arrays, **rules) == "mosaic_gpu"
    text = lower_for_cuda(mosaic_gpu.latent_attention_mosaic_gpu, *arrays, **rules)
    assert text.count("@mosaic_gpu") == 2


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": "float32"}, "16 bits, got a cache of float32"),
        ({"q_dtype": "float16"}, "one dtype, got float16 and bfloat16"),
        ({"latent_dim": 192}, "multiple of 128, at most 512, got latent_dim=192"),
        ({"latent_dim": 640}, "multiple of 128, at most 512, got latent_dim=640"),
        ({"rope_dim": 32}, "rotary part must be 64 wide, got 32"),
        ({"num_unused_columns": 64}, "wide (latent, rotary), got"),
        ({"block_size": 48}, "multiple of 64, got block_size=48"),
        ({"block_size": 4}, "multiple of 64, got block_size=4"),
        ({"num_q_heads": 0}, "an array is empty"),
    ],
)
def test_what_the_kernels_cannot_do_goes_to_xla(sizes, reason, mosaic_gpu):
    arrays, rules = sized(**sizes)
    assert reason in mosaic_gpu.misfit(*arrays, **rules)
    assert preferred_body("latent_attention", _BODIES, H200, *arrays, **rules) == "xla"


def equations_of(value):
    """The equations of a traced function, and of all functions in it, in order."""
    jaxpr = getattr(value, "jaxpr", value)
    for eqn in getattr(jaxpr, "eqns", ()):
        yield eqn
        for param in eqn.params.values():
            for part in param if isinstance(param, (tuple, list)) else (param,):
                yield from equations_of(part)


def is_store_to_smem(eqn):
    return eqn.primitive.name == "swap" and "smem" in str(eqn.invars[0].aval.memory_space).lower()


def test_what_is_stored_is_committed_before_wgmma_or_a_copy_reads_it(mosaic_gpu):
    """A simulation does not see all of this: its stand-in for wgmma reads like any other code."""
    arrays, rules = sized()
    call = functools.partial(mosaic_gpu.latent_attention_mosaic_gpu, **rules)
    read_or_handed_over = ("commit_smem", "wgmma_ref", "copy_smem_to_gmem", "barrier_arrive")
    order = [
        "store" if is_store_to_smem(eqn) else eqn.primitive.name
        for eqn in equations_of(jax.make_jaxpr(call)(*arrays))
        if is_store_to_smem(eqn) or eqn.primitive.name in read_or_handed_over
    ]
    stored = ["store", "commit_smem"]
    # Logits, room for Q, then the weights, which are handed to the value warpgroups.
    scores = ["wgmma_ref", "barrier_arrive", *stored, "barrier_arrive"]
    # Rows of V cleared, weighted values, the tile's room; then the output, through a tile.
    values = [*stored, "wgmma_ref", "barrier_arrive", *stored, "copy_smem_to_gmem"]
    merge = [*stored, "copy_smem_to_gmem"]
    assert [name for name, _ in itertools.groupby(order)] == [
        *scores,
        *(*values, "barrier_arrive"),
        *(*values, "barrier_arrive"),
        *merge,
    ]
