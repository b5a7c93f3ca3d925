"""Tests of `kv_scatter/mosaic_tpu.py`, interpreted and lowered: no TPU is needed.

`tests/aot/test_tpu.py` compiles the kernel for real chips.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import kv_scatter
from pallas_kernels.kv_scatter.cases import CASES, KVScatterCase, build_inputs
from pallas_kernels.kv_scatter.mosaic_tpu import (
    MAX_TOKENS,
    NUM_TOKENS_FOR_LONG_STRIPS,
    kv_scatter_mosaic_tpu,
    misfit,
)
from tests import on_device
from tests.pallas_kernels.kv_scatter.test_reference import scatter_in_numpy
from tests.quick_compile import slow_unless_named

# The simulated case has a bfloat16 cache.
QUICK_CASES = ("mla_without_v",)


def assert_caches_equal(got, wanted):
    assert got.dtype == wanted.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


@pytest.mark.parametrize("case", slow_unless_named(CASES, *QUICK_CASES))
def test_equals_numpy(case, run_jitted):
    arguments = build_inputs(case).body_arguments
    got = run_jitted(kv_scatter_mosaic_tpu, *arguments, interpret=True)
    assert_caches_equal(got, scatter_in_numpy(*arguments))


# More strips than buffers, several segments in one strip, and padding among them.
SIMULATED_CASES = [
    KVScatterCase(name="scattered", num_tokens=28, num_kv_heads=1, dtype="bfloat16", head_dim=128),
    pytest.param(
        KVScatterCase(
            name="every_slot", num_tokens=576, num_padding_tokens=0, num_blocks=9, block_size=64
        ),
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("case", SIMULATED_CASES, ids=lambda case: case.name)
def test_nothing_races_where_copies_finish_late(case, run_jitted, capfd):
    """Copies happen when they are waited for, and memory holds NaN until then."""
    arguments = build_inputs(case).body_arguments
    pltpu.reset_tpu_interpret_mode_state()
    params = pltpu.InterpretParams(detect_races=True, dma_execution_mode="on_wait")
    got = run_jitted(kv_scatter_mosaic_tpu, *arguments, interpret=params)
    jax.block_until_ready(got)
    # JAX 0.12 raises at a race, older ones print it and carry on.
    printed = capfd.readouterr()
    assert "RACE DETECTED" not in printed.out + printed.err
    assert_caches_equal(got, scatter_in_numpy(*arguments))


NUM_BLOCKS, BLOCK_SIZE, MAX_SLOTS = 8, 16, 40


@st.composite
def slots_of_a_batch(draw):
    """Draws runs of consecutive slots (prompts), single slots (decodes) and padding."""
    num_slots = NUM_BLOCKS * BLOCK_SIZE
    slots = []
    for _ in range(draw(st.integers(0, 8))):
        first, length = draw(st.integers(0, num_slots - 1)), draw(st.sampled_from([1, 2, 8, 23]))
        slots += [
            slot for slot in range(first, min(first + length, num_slots)) if slot not in slots
        ]
        slots += [2 * num_slots] * draw(st.integers(0, 1))
    slots = slots[:MAX_SLOTS]
    return np.array(slots + [2 * num_slots] * (MAX_SLOTS - len(slots)), np.int32)


@settings(max_examples=25)  # the interpreter is slow
@given(slots_np=slots_of_a_batch())
def test_equals_numpy_on_any_slots(run_jitted, slots_np):
    rng = np.random.default_rng(0)
    cache_np = rng.standard_normal((2, 2 * NUM_BLOCKS, 3, BLOCK_SIZE, 4)).astype(np.float32)
    k_np, v_np = rng.standard_normal((2, MAX_SLOTS, 3, 4)).astype(np.float32)
    wanted = cache_np.copy()
    for slot, k, v in zip(slots_np, k_np, v_np, strict=True):
        if slot < NUM_BLOCKS * BLOCK_SIZE:
            block, offset = divmod(slot, BLOCK_SIZE)
            wanted[1, 2 * block, :, offset] = k
            wanted[1, 2 * block + 1, :, offset] = v
    got = run_jitted(
        *(kv_scatter_mosaic_tpu, cache_np, k_np, v_np, slots_np, jnp.int32(1)), interpret=True
    )
    np.testing.assert_array_equal(got, wanted)


def test_no_tokens_change_nothing():
    cache = on_device.ones((1, 2, 1, 8, 128))
    none = on_device.zeros((0, 1, 128))
    got = kv_scatter_mosaic_tpu(cache, none, none, on_device.zeros(0, jnp.int32), 0)
    assert_caches_equal(got, cache)


def test_not_a_number_stays_in_its_own_token(run_jitted):
    cache = np.zeros((1, 2, 1, 8, 128), jnp.bfloat16)
    token = np.ones((2, 1, 128), jnp.bfloat16)
    token[0] = np.nan
    slots = np.array([3, 5], np.int32)
    got = run_jitted(kv_scatter_mosaic_tpu, cache, token, token, slots, 0, interpret=True)
    for part in range(2):
        assert np.isnan(got[0, part, 0, :, 0]).tolist() == [i == 3 for i in range(8)]
        assert got[0, part, 0, 5, 0] == 1


def described(
    num_tokens=64, num_kv_heads=8, head_dim=128, block_size=16, dtype=jnp.bfloat16, has_v=True
):
    """Arrays of a call, by shape and dtype alone."""
    array = jax.ShapeDtypeStruct
    new = array((num_tokens, num_kv_heads, head_dim), dtype)
    return (
        array((2, 1024, num_kv_heads, block_size, head_dim), dtype),
        new,
        new if has_v else None,
        array((num_tokens,), jnp.int32),
        array((), jnp.int32),
    )


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": jnp.float16}, "kv_cache is float16"),
        ({"dtype": jnp.uint16}, "kv_cache is uint16"),
        ({"head_dim": 80}, "kv_cache has head_dim 80"),
        ({"block_size": 12}, "block_size is 12"),
        ({"num_tokens": MAX_TOKENS + 1}, "more than SMEM"),
        (
            {"num_tokens": 1024, "num_kv_heads": 256, "head_dim": 256, "block_size": 64},
            "bytes of VMEM",
        ),
    ],
    ids=str,
)
def test_misfit_names_what_does_not_fit(sizes, reason):
    assert reason in misfit(*described(**sizes))


LONG_STRIPS = {"num_tokens": NUM_TOKENS_FOR_LONG_STRIPS, "dtype": jnp.float32, "block_size": 256}


@pytest.mark.parametrize(
    ("sizes", "device_kind"),
    [
        ({}, "TPU v5 lite"),
        pytest.param({}, "TPU v6 lite", marks=pytest.mark.slow),
        (LONG_STRIPS, "TPU v5 lite"),
        ({"num_kv_heads": 1, "has_v": False, "block_size": 8}, "TPU v6 lite"),
    ],
    ids=str,
)
def test_lowers_for_tpu_in_place(sizes, device_kind):
    arrays = described(**sizes)
    assert misfit(*arrays) is None
    chip = jax.sharding.AbstractDevice(device_kind=device_kind, num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((1,), ("chip",), abstract_device=chip)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(kv_scatter_mosaic_tpu).trace(*arrays)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
    (call,) = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert call.count("output_operand_alias<") == 1


def test_op_runs_it_by_name():
    call = functools.partial(kv_scatter, implementation="mosaic_tpu_interpret")
    assert "pallas_call" in str(jax.make_jaxpr(call)(*described()))
    xla = functools.partial(kv_scatter, implementation="xla")
    assert "pallas_call" not in str(jax.make_jaxpr(xla)(*described()))
