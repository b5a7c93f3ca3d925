"""Tests of `paged_attention/mosaic_gpu.py`: both kernels as one op, simulated and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
DECODE, RAGGED = "paged_attention_decode", "paged_attention_ragged"


@pytest.fixture
def mosaic_gpu():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.paged_attention import mosaic_gpu

    return mosaic_gpu


def case_of(name, requests, **options):
    defaults = {"head_dim": 64, "dtype": "bfloat16"}
    return PagedAttentionCase(name=name, requests=requests, **{**defaults, **options})


CASES = [
    # Decode alone: empty requests in between, a request without tokens, padding, sinks.
    case_of("decode", ((0, 0), (1, 40), (0, 12), (1, 1), (0, 0)), has_sinks=True),
    case_of("one_token_that_sees_nothing", ((1, 20), (1, 0)), is_causal=False, num_kv_heads=1),
    case_of("padding_only", ((0, 0), (0, 0)), num_padding_tokens=4, max_blocks_per_req=2),
    case_of(
        *("mixed_window_soft_cap", ((1, 40), (20, 90), (0, 0), (1, 1), (7, 7), (1, 65))),
        **{"sliding_window": 24, "soft_cap": 5.0, "has_sinks": True, "num_kv_heads": 1},
    ),
    case_of(
        *("not_causal", ((5, 40), (1, 70), (9, 3), (0, 8), (2, 0))),
        **{"is_causal": False, "num_kv_heads": 1},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_reference(case, mosaic_gpu, run_simulated, attend_by_reference):
    inputs = build_inputs(case)
    options = {**inputs.rules, **inputs.traced_options}
    assert mosaic_gpu.misfit(*inputs.arrays, **options) is None

    def body(traced_options, *arrays, interpret):
        return mosaic_gpu.paged_attention_mosaic_gpu(
            *arrays, **inputs.rules, **traced_options, interpret=interpret
        )

    out, lse = run_simulated(body, inputs.traced_options, *inputs.arrays)
    wanted_out, wanted_lse = attend_by_reference(case)
    assert out.dtype == inputs.q.dtype
    np.testing.assert_allclose(np.asarray(out, np.float32), wanted_out, atol=2e-2, rtol=2e-2)
    np.testing.assert_allclose(lse, wanted_lse, atol=1e-3)


def call_of(max_query_len, **sizes):
    """Arguments of the body, without values of the arrays: 8 requests of a small Llama's layer."""
    head_dim, dtype = sizes.get("head_dim", 128), sizes.get("dtype", "bfloat16")
    block_size = sizes.get("block_size", 16)
    cache_dims = (2, 2 * 50, 8, block_size, head_dim)
    kv_cache = jax.ShapeDtypeStruct(cache_dims, sizes.get("cache_dtype", dtype))
    q = jax.ShapeDtypeStruct((64, 32, head_dim), dtype)
    integers = [jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((), (8, 32), (8,), (9,))]
    options = {
        **{"scale": 0.1, "is_causal": True, "max_query_len": max_query_len},
        **dict.fromkeys(("sliding_window", "chunk_size", "soft_cap")),
        **dict.fromkeys(("sinks", "alibi_slopes")),
        "kv_dtype": sizes.get("kv_dtype"),
    }
    return (q, kv_cache, *integers), options


@pytest.mark.parametrize("max_query_len, wanted", [(1, {DECODE}), (None, {DECODE, RAGGED})])
def test_a_batch_of_single_tokens_needs_one_kernel(
    max_query_len, wanted, mosaic_gpu, lower_for_cuda
):
    arrays, options = call_of(max_query_len)
    text = lower_for_cuda(mosaic_gpu.paged_attention_mosaic_gpu, *arrays, **options)
    assert {name for name in (DECODE, RAGGED) if name in text} == wanted


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"dtype": "float32"}, "wgmma multiplies"),
        ({"cache_dtype": "float16"}, "the cache's dtype"),
        ({"cache_dtype": "uint16", "kv_dtype": "bfloat16"}, "16-bit floats stored as uint16"),
        ({"block_size": 48}, "blocks of 48"),
    ],
    ids=str,
)
@pytest.mark.parametrize("max_query_len", [1, None])
def test_misfit_names_what_does_not_fit(sizes, reason, max_query_len, mosaic_gpu):
    arrays, options = call_of(max_query_len, **sizes)
    assert reason in mosaic_gpu.misfit(*arrays, **options)


def test_what_only_the_ragged_kernel_cannot_do_does_not_stop_decode(mosaic_gpu):
    arrays, options = call_of(1, head_dim=112)
    assert mosaic_gpu.misfit(*arrays, **options) is None
    arrays, options = call_of(None, head_dim=112)
    assert "head_dim is 112" in mosaic_gpu.misfit(*arrays, **options)
