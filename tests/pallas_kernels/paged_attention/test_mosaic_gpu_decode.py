"""Tests of `paged_attention/mosaic_gpu_decode.py`, simulated and lowered: no GPU is needed.

What a simulation does not run (wgmma itself, swizzles, register layouts) only a GPU can show.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from tests.quick_compile import marked_sizes

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
TOLERANCES = {"float16": 2e-3, "bfloat16": 2e-2}
LOOKS_BACK = {"sliding_window": None, "chunk_size": None, "soft_cap": None}


@pytest.fixture
def decode():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.paged_attention import mosaic_gpu_decode

    return mosaic_gpu_decode


def case_of(name, seq_lens, num_shares, is_slow=False, **sizes):
    """A batch of decode tokens, one a request, and into how many shares the work is cut."""
    requests = tuple((1, seq_len) for seq_len in seq_lens)
    defaults = {"num_padding_tokens": 0, "dtype": "bfloat16", "head_dim": 64}
    case = PagedAttentionCase(name=name, requests=requests, **{**defaults, **sizes})
    marks = [pytest.mark.slow] * is_slow
    return pytest.param(case, num_shares, id=name, marks=marks)


# Lengths around the edges of a 64-token tile; 260 tokens are more tiles than there are stages.
CASES = [
    case_of("one_pass", (1, 64, 65), None),
    case_of("one_pass_more_tiles_than_stages", (500,), None, num_kv_heads=1, num_q_heads=1),
    case_of(
        *("cut_window_soft_cap", (40, 130, 260), 5),
        **{"sliding_window": 70, "soft_cap": 2.0},
    ),
    # V is padded to 128 columns in shared memory.
    case_of("head_dim_80_blocks_of_8", (75,), 2, head_dim=80, block_size=8),
    case_of(
        *("head_dim_96_chunks_blocks_of_128", (129, 200), None),
        **{
            "head_dim": 96,
            "block_size": 128,
            "chunk_size": 100,
            "dtype": "float16",
        },
    ),
    case_of(
        *("group_of_12_head_dim_128", (70,), 2),
        **{"head_dim": 128, "num_q_heads": 12, "num_kv_heads": 1},
    ),
    case_of("window_of_one", (1, 65, 129), 2, is_slow=True, sliding_window=1),
    case_of("head_dim_16", (3, 70), None, is_slow=True, head_dim=16),
    case_of("head_dim_192", (3, 200), 3, is_slow=True, head_dim=192, num_kv_heads=1),
    case_of(
        *("head_dim_256_blocks_of_256", (300, 10), 3),
        **{"is_slow": True, "head_dim": 256, "num_kv_heads": 1, "block_size": 256},
    ),
    # K and V take turns in one ring of three tiles, and go around it.
    case_of("head_dim_512", (70, 200), 2, head_dim=512, num_q_heads=2, num_kv_heads=1),
    case_of(
        *("head_dim_512_window_blocks_of_256", (300, 10), None),
        **{"is_slow": True, "head_dim": 512, "num_kv_heads": 1, "block_size": 256},
        sliding_window=150,
    ),
    case_of("blocks_of_64_float16", (64, 128, 129), 2, True, block_size=64, dtype="float16"),
]


@pytest.mark.parametrize("case, num_shares", CASES)
def test_equals_reference(case, num_shares, decode, run_simulated, attend_by_reference):
    inputs = build_inputs(case)
    rules = {name: inputs.rules[name] for name in ("scale", *LOOKS_BACK)}
    arrays = (*inputs.arrays[:2], jnp.int32(inputs.row), *inputs.arrays[3:5])
    assert decode.decode_misfit(*arrays[:2]) is None
    got = run_simulated(decode.decode_rows_mosaic_gpu, *arrays, num_shares=num_shares, **rules)
    wanted = attend_by_reference(case)
    # The output is not rounded to q's dtype yet, the weights inside are.
    np.testing.assert_allclose(got[0], wanted[0], atol=TOLERANCES[case.dtype])
    np.testing.assert_allclose(got[1], wanted[1], atol=1e-4)


NUM_REQS, MAX_LEN, BLOCK_SIZE = 4, 160, 32


@pytest.fixture(scope="module")
def simulated_and_reference():
    """Both functions compiled once, for any sequence lengths up to MAX_LEN."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    from pallas_kernels.paged_attention.mosaic_gpu_decode import decode_rows_mosaic_gpu
    from pallas_kernels.paged_attention.reference import paged_attention_reference

    def by_reference(q, kv_cache, row, block_tables, seq_lens):
        query_start_loc = jnp.arange(NUM_REQS + 1, dtype=jnp.int32)
        return paged_attention_reference(
            *(q, kv_cache, row, block_tables, seq_lens, query_start_loc),
            **{"scale": 0.3, "is_causal": True, "max_query_len": 1, **LOOKS_BACK},
            **dict.fromkeys(("sinks", "alibi_slopes", "kv_dtype")),
        )

    params = plgpu.InterpretGPUParams(detect_races=True)
    simulated = functools.partial(
        decode_rows_mosaic_gpu, scale=0.3, num_shares=3, interpret=params, **LOOKS_BACK
    )
    return jax.jit(simulated), jax.jit(by_reference)


@settings(max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seq_lens=st.lists(st.integers(0, MAX_LEN), min_size=NUM_REQS, max_size=NUM_REQS))
def test_equals_reference_at_any_lengths(seq_lens, simulated_and_reference, capfd):
    case = PagedAttentionCase(
        name="drawn",
        requests=tuple((1, seq_len) for seq_len in seq_lens),
        num_padding_tokens=0,
        max_blocks_per_req=MAX_LEN // BLOCK_SIZE,
        block_size=BLOCK_SIZE,
        head_dim=64,
        dtype="bfloat16",
    )
    inputs = build_inputs(case)
    num_blocks = NUM_REQS * MAX_LEN // BLOCK_SIZE + 3
    pad = ((0, 0), (0, 2 * num_blocks - inputs.kv_cache.shape[1]), (0, 0), (0, 0), (0, 0))
    kv_cache_np = np.pad(np.asarray(inputs.kv_cache), pad, constant_values=np.nan)
    arrays = (inputs.q, kv_cache_np, jnp.int32(inputs.row), *inputs.arrays[3:5])
    simulated, by_reference = simulated_and_reference
    got, wanted = simulated(*arrays), by_reference(*arrays)
    is_real = np.array(seq_lens) > 0
    np.testing.assert_allclose(
        np.asarray(got[0])[is_real], np.asarray(wanted[0], np.float32)[is_real], atol=2e-2
    )
    np.testing.assert_allclose(
        np.asarray(got[1])[is_real], np.asarray(wanted[1])[is_real], atol=1e-4
    )
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err


def sized(
    head_dim=128,
    block_size=16,
    num_q_heads=32,
    num_kv_heads=8,
    num_reqs=8,
    max_len=8192,
    dtype="bfloat16",
):
    """Arguments of the kernel without their values, the static ones left out."""
    kv_cache = jax.ShapeDtypeStruct((2, 2 * 50, num_kv_heads, block_size, head_dim), dtype)
    integers = [
        jax.ShapeDtypeStruct(dims, jnp.int32)
        for dims in ((), (num_reqs, max_len // block_size), (num_reqs,))
    ]
    return jax.ShapeDtypeStruct((num_reqs, num_q_heads, head_dim), dtype), kv_cache, *integers


# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"head_dim": 16, "block_size": 8, "num_q_heads": 1, "num_kv_heads": 1},
    {"head_dim": 192},
    {"head_dim": 256, "num_reqs": 256, "max_len": 1024},
    {"head_dim": 32, "block_size": 32, "num_q_heads": 5, "num_kv_heads": 1},
    {"head_dim": 64, "block_size": 64, "num_q_heads": 17, "num_kv_heads": 1},
    {"head_dim": 80, "block_size": 8},
    {"head_dim": 96, "block_size": 128, "dtype": "float16"},
    {"head_dim": 112, "max_len": 512},
    {"head_dim": 128, "block_size": 256, "num_q_heads": 64, "num_kv_heads": 1},
    {"head_dim": 512, "block_size": 8, "num_q_heads": 16, "num_kv_heads": 1},
]
SLOW_FITTING = [
    *({"head_dim": head_dim} for head_dim in (16, 32, 64, 80, 96, 112, 128, 192)),
    *({"head_dim": head_dim} for head_dim in (256, 320, 384, 448, 512)),
    *({"block_size": block_size} for block_size in (8, 32, 64, 128, 256)),
    *({"num_q_heads": num_q_heads, "num_kv_heads": 1} for num_q_heads in (1, 5, 17, 64)),
    {"dtype": "float16"},
    {"max_len": 512},
    {"num_reqs": 256, "max_len": 1024},
]


@pytest.mark.parametrize("sizes", marked_sizes(FITTING, slow=SLOW_FITTING), ids=str)
def test_lowers_for_cuda(sizes, decode, lower_for_cuda):
    arrays = sized(**sizes)
    assert decode.decode_misfit(*arrays[:2]) is None
    text = lower_for_cuda(decode.decode_rows_mosaic_gpu, *arrays, scale=0.1, **LOOKS_BACK)
    assert "paged_attention_decode" in text


@pytest.mark.parametrize(
    "rule", [{"sliding_window": 100, "soft_cap": 30.0}, {"chunk_size": 64}], ids=str
)
def test_rules_lower_for_cuda(rule, decode, lower_for_cuda):
    rules = {**LOOKS_BACK, **rule}
    text = lower_for_cuda(decode.decode_rows_mosaic_gpu, *sized(), scale=0.1, **rules)
    assert "paged_attention_decode" in text


@pytest.mark.parametrize(
    "rule, is_cut",
    [
        ({}, True),
        # The most that lies in 64 tiles wherever it begins, and one position more.
        ({"sliding_window": 63 * 64 + 1}, False),
        ({"sliding_window": 63 * 64 + 2}, True),
        ({"chunk_size": 2048}, False),
    ],
    ids=str,
)
def test_only_keys_in_sight_count_towards_the_length(rule, is_cut, decode):
    """256 requests x 8 heads are a single pass, unless single programs would last long."""
    call = functools.partial(decode.decode_rows_mosaic_gpu, scale=0.1, **{**LOOKS_BACK, **rule})
    text = str(jax.make_jaxpr(call)(*sized(num_reqs=256, max_len=131_072)))
    num_partials = 2048 + 2 * 132 - 1 if is_cut else 2048
    assert f"f32[{num_partials},128,8]" in text


@pytest.mark.parametrize(
    "sizes, reason",
    [
        ({"dtype": "float32"}, "wgmma multiplies"),
        ({"head_dim": 72}, "head_dim 72 is neither"),
        ({"head_dim": 272}, "head_dim 272 is neither"),
        ({"head_dim": 576}, "head_dim 576 is neither"),
        ({"num_q_heads": 65, "num_kv_heads": 1}, "65 query heads share"),
        ({"num_q_heads": 64, "num_kv_heads": 1, "head_dim": 256}, "64 query heads share"),
        ({"num_q_heads": 17, "num_kv_heads": 1, "head_dim": 512}, "17 query heads share"),
        ({"block_size": 48}, "blocks of 48 tokens"),
        ({"block_size": 4}, "blocks of 4 tokens"),
    ],
    ids=str,
)
def test_misfit_names_what_does_not_fit(sizes, reason, decode):
    assert reason in decode.decode_misfit(*sized(**sizes)[:2])


def test_a_cache_of_another_dtype_does_not_fit(decode):
    q, kv_cache, *_ = sized()
    reason = decode.decode_misfit(q, kv_cache.update(dtype="float16"))
    assert "the cache's dtype" in reason


def primitives_of(value):
    """Names of the primitives of a traced function, and of all functions in it, in order."""
    jaxpr = getattr(value, "jaxpr", value)
    for eqn in getattr(jaxpr, "eqns", ()):
        yield eqn.primitive.name
        for param in eqn.params.values():
            for part in param if isinstance(param, (tuple, list)) else (param,):
                yield from primitives_of(part)


def test_what_is_stored_is_committed_before_wgmma_reads_it(decode):
    """A simulation does not see this: its stand-in for wgmma reads like any other code."""
    call = functools.partial(decode.decode_rows_mosaic_gpu, scale=0.1, **LOOKS_BACK)
    order = [
        name
        for name in primitives_of(jax.make_jaxpr(call)(*sized()))
        if name in ("swap", "commit_smem", "wgmma_ref")
    ]
    # Of a tile: logits; weights stored, V's unseen rows cleared in two pieces; weighted values.
    first_six = ["wgmma_ref", "swap", "swap", "swap", "commit_smem", "wgmma_ref"]
    assert order[:6] == first_six
    assert set(order[6:]) <= {"swap"}  # the results, to device memory
