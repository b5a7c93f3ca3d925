"""Tests of `paged_attention/mosaic_gpu_ragged.py`, simulated and lowered: no GPU is needed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU
from pallas_kernels.paged_attention.cases import PagedAttentionCase, build_inputs
from pallas_kernels.paged_attention.ragged_tiles import RaggedConfig
from tests.quick_compile import marked_sizes

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)
KERNEL = "paged_attention_ragged"
# 16 tokens and 8 heads a tile, and rings of two tiles of 64 keys: each goes around in a short case.
SMALL_TILES = RaggedConfig(heads_per_tile=8, kv_tile=64, num_stages=2)


@pytest.fixture
def mosaic_gpu_ragged():
    """The module, imported only where JAX is new enough."""
    from pallas_kernels.paged_attention import mosaic_gpu_ragged

    return mosaic_gpu_ragged


def case_of(name, requests, **options):
    defaults = {"head_dim": 64, "dtype": "bfloat16", "num_q_heads": 8, "num_kv_heads": 1}
    return PagedAttentionCase(name=name, requests=requests, **{**defaults, **options})


def check_equals_reference(
    case, module, run_simulated, attend_by_reference, *, config=None, skip_single=False
):
    """Compares the rows that the kernel promises; the cache is NaN wherever nothing was written."""
    inputs = build_inputs(case)
    of_the_op = ("max_query_len", "kv_dtype")
    rules = {name: rule for name, rule in inputs.rules.items() if name not in of_the_op}
    arrays = [jnp.asarray(array) for array in inputs.arrays]
    assert module.ragged_misfit(*arrays[:2], scale=rules["scale"]) is None
    out, lse = run_simulated(
        module.ragged_rows_mosaic_gpu, *arrays, **rules, config=config, skip_single=skip_single
    )
    assert out.shape == inputs.q.shape and out.dtype == inputs.q.dtype
    assert lse.shape == inputs.q.shape[:2] and lse.dtype == jnp.float32
    num_query = np.array([num for num, _ in case.requests])
    is_promised = np.repeat((num_query > 1) | (not skip_single), num_query)
    wanted_out, wanted_lse = (x[: len(is_promised)] for x in attend_by_reference(case))
    out, lse = (np.asarray(x, np.float32)[: len(is_promised)] for x in (out, lse))
    tolerance = {"atol": 1e-2, "rtol": 2e-2}
    np.testing.assert_allclose(out[is_promised], wanted_out[is_promised], **tolerance)
    np.testing.assert_allclose(lse[is_promised], wanted_lse[is_promised], atol=1e-4)


SMALL_TILE_CASES = [
    # 20 tokens: a whole tile, and one that ends inside a warpgroup's rows; 5 KV tiles, of which the
    # last reaches past the end of the block table.
    case_of("causal", ((20, 300), (0, 0), (1, 30), (5, 5), (0, 40)), max_blocks_per_req=19),
    # The window begins and ends inside KV tiles, and both have rows of V that are NaN.
    case_of("window_soft_cap", ((18, 200), (1, 70)), sliding_window=70, soft_cap=3.0),
    case_of("chunks", ((20, 200),), chunk_size=50, block_size=64),
    case_of("not_causal", ((3, 150), (2, 0), (17, 64)), is_causal=False, num_padding_tokens=0),
]


@pytest.mark.parametrize("case", SMALL_TILE_CASES, ids=lambda case: case.name)
def test_equals_reference(case, mosaic_gpu_ragged, run_simulated, attend_by_reference):
    common = (mosaic_gpu_ragged, run_simulated, attend_by_reference)
    check_equals_reference(case, *common, config=SMALL_TILES)


DEFAULT_TILE_CASES = [
    # Blocks longer than a KV tile; single tokens are left to the decode kernel.
    case_of("blocks_of_256", ((9, 400), (1, 3), (2, 2)), block_size=256),
    case_of(
        *("group_of_3_head_dim_96", ((9, 100),)),
        **{"num_q_heads": 3, "head_dim": 96, "dtype": "float16", "scale": 0.3},
    ),
    case_of("head_dim_256", ((9, 140),), head_dim=256, num_q_heads=2, block_size=8),
    # Two parts of V's columns, and tiles of 32 keys, fewer than registers have rows. Both compute
    # warpgroups have tokens, and the window begins and ends inside tiles.
    case_of(
        *("head_dim_512", ((70, 140), (1, 3))),
        **{"head_dim": 512, "num_q_heads": 1, "sliding_window": 75},
    ),
]


@pytest.mark.parametrize("case", DEFAULT_TILE_CASES, ids=lambda case: case.name)
def test_equals_reference_in_default_tiles(
    case, mosaic_gpu_ragged, run_simulated, attend_by_reference
):
    common = (mosaic_gpu_ragged, run_simulated, attend_by_reference)
    check_equals_reference(case, *common, skip_single=True)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_equals_reference_on_random_batches(
    seed, mosaic_gpu_ragged, run_simulated, attend_by_reference
):
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(rng.integers(1, 5)):
        num_query = int(rng.integers(0, 40))
        requests.append((num_query, num_query + int(rng.integers(0, 250))))
    limit = ({}, {"sliding_window": int(rng.integers(1, 150))}, {"chunk_size": 90})[seed % 3]
    case = case_of(
        f"random_{seed}", tuple(requests), block_size=int(rng.choice([8, 16, 32, 64, 128])), **limit
    )
    common = (mosaic_gpu_ragged, run_simulated, attend_by_reference)
    check_equals_reference(case, *common, config=SMALL_TILES, skip_single=bool(seed % 2))


def call_of(**sizes):
    """Arguments of the body, without values of the arrays, and the rules of the call."""
    head_dim, dtype = sizes.get("head_dim", 128), sizes.get("dtype", "bfloat16")
    num_q_heads, num_kv_heads = sizes.get("heads", (32, 8))
    cache_dims = (2, 2 * 50, num_kv_heads, sizes.get("block_size", 16), head_dim)
    kv_cache = jax.ShapeDtypeStruct(cache_dims, sizes.get("cache_dtype", dtype))
    num_tokens = sizes.get("num_tokens", 64)
    q = jax.ShapeDtypeStruct((num_tokens, num_q_heads, head_dim), dtype)
    integers = [jax.ShapeDtypeStruct(dims, jnp.int32) for dims in ((), (8, 32), (8,), (9,))]
    rules = {
        **{"scale": 0.1, "is_causal": True, "skip_single": True},
        **dict.fromkeys(("sliding_window", "chunk_size", "soft_cap")),
    }
    rules |= {name: sizes[name] for name in rules if name in sizes}
    return (q, kv_cache, *integers), rules


# Each value at least once; the values one at a time run with `pytest -m slow`.
FITTING = [
    {"head_dim": 64, "block_size": 8, "heads": (1, 1)},
    {"head_dim": 128, "block_size": 128, "heads": (40, 8), "chunk_size": 96, "num_tokens": 8192},
    {"head_dim": 256, "is_causal": False, "num_tokens": 3, "skip_single": False},
    {
        **{"head_dim": 80, "block_size": 32, "heads": (8, 8), "dtype": "float16"},
        **{"sliding_window": 100, "soft_cap": 30.0},
    },
    {"head_dim": 96, "block_size": 64, "heads": (71, 1)},
    {"head_dim": 192, "heads": (12, 2)},
    *({"head_dim": 256, "block_size": block_size} for block_size in (8, 256)),
    {"head_dim": 512, "block_size": 8, "heads": (8, 1), "sliding_window": 100, "soft_cap": 30.0},
]
SLOW_FITTING = [
    *({"head_dim": head_dim} for head_dim in (64, 80, 96, 128, 192, 256, 512)),
    *({"block_size": block_size} for block_size in (8, 32, 64, 128, 256)),
    *({"heads": heads} for heads in ((1, 1), (8, 8), (71, 1), (40, 8), (12, 2))),
    {"head_dim": 80, "dtype": "float16", "sliding_window": 100, "soft_cap": 30.0},
    {"chunk_size": 8192, "num_tokens": 8192},
    {"is_causal": False, "num_tokens": 3},
]


@pytest.mark.parametrize("sizes", marked_sizes(FITTING, slow=SLOW_FITTING), ids=str)
def test_lowers_for_cuda(sizes, mosaic_gpu_ragged, lower_for_cuda):
    arrays, rules = call_of(**sizes)
    assert mosaic_gpu_ragged.ragged_misfit(*arrays[:2], scale=rules["scale"]) is None
    assert KERNEL in lower_for_cuda(mosaic_gpu_ragged.ragged_rows_mosaic_gpu, *arrays, **rules)


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": "float32"}, "wgmma multiplies"),
        ({"cache_dtype": "float16"}, "the cache's dtype"),
        ({"head_dim": 112}, "head_dim is 112"),
        ({"head_dim": 320}, "head_dim is 320"),
        ({"head_dim": 512, "block_size": 48}, "blocks of 48 tokens do not fill tiles of 32"),
        ({"block_size": 48}, "blocks of 48"),
        ({"block_size": 4}, "blocks of 4"),
        ({"scale": 0.0}, "scale is 0.0"),
    ],
    ids=str,
)
def test_misfit_names_what_does_not_fit(sizes, reason, mosaic_gpu_ragged):
    arrays, rules = call_of(**sizes)
    assert reason in mosaic_gpu_ragged.ragged_misfit(*arrays[:2], scale=rules["scale"])


def test_a_config_for_other_groups_raises(mosaic_gpu_ragged, lower_for_cuda):
    arrays, rules = call_of(heads=(32, 8))  # groups of 4
    with pytest.raises(ValueError, match="groups of 4 query heads"):
        lower_for_cuda(
            mosaic_gpu_ragged.ragged_rows_mosaic_gpu, *arrays, **rules, config=SMALL_TILES
        )


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


def test_what_is_stored_is_committed_before_wgmma_or_a_copy_reads_it(mosaic_gpu_ragged):
    """A simulation does not see all of this: its stand-in for wgmma reads like any other code."""
    arrays, rules = call_of()
    call = functools.partial(mosaic_gpu_ragged.ragged_rows_mosaic_gpu, **rules)
    read_or_handed_over = ("commit_smem", "wgmma_ref", "copy_smem_to_gmem", "barrier_arrive")
    order = [
        "store" if is_store_to_smem(eqn) else eqn.primitive.name
        for eqn in equations_of(jax.make_jaxpr(call)(*arrays))
        if is_store_to_smem(eqn) or eqn.primitive.name in read_or_handed_over
    ]
    stored = ["store", "commit_smem"]
    # Logits, then weighted values; each arrival says that a tile or the turn is free.
    tile = ["wgmma_ref", "barrier_arrive", "wgmma_ref", "barrier_arrive"]
    assert [name for name, _ in itertools.groupby(order)] == [
        *(*stored, "barrier_arrive"),  # Q, and the second warpgroup's first turn
        *tile,
        *(*stored, "barrier_arrive", *tile),  # a tile at an edge, its V cleared
        *(*stored, "copy_smem_to_gmem"),  # the output
    ]


def test_a_soft_cap_is_more_precise_than_the_hardware_tanh(mosaic_gpu_ragged):
    """That one is wrong by 2^-11: with a cap of 50 and large logits, weights by 2 percent."""
    arrays, rules = call_of(soft_cap=50.0)
    call = functools.partial(mosaic_gpu_ragged.ragged_rows_mosaic_gpu, **rules)
    names = {eqn.primitive.name for eqn in equations_of(jax.make_jaxpr(call)(*arrays))}
    assert "tanh" not in names and "wgmma_ref" in names


def test_the_tanh_of_a_soft_cap_is_one():
    from pallas_kernels.paged_attention.mosaic_gpu_ragged_kernel import _tanh

    x = np.concatenate([np.linspace(-20, 20, 2001), [-1e30, 1e30, -np.inf, np.inf]])
    np.testing.assert_allclose(_tanh(jnp.asarray(x, jnp.float32)), np.tanh(x), atol=4e-7)
