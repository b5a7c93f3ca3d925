"""XLA's options of a platform, and which library multiplies float32 on a CPU."""

import itertools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from paxkv.runner import warmup
from paxkv.runner.bucketing import BurstShape, CopyShape, StepBuckets, StepShape
from paxkv.runner.compiler_options import YNNPACK_MIN_ROWS, compiler_options, product_rows
from paxkv.runner.kv_cache_arrays import device_mesh
from paxkv.runner.processor import instruction_sets
from paxkv.runner.warmup import StepPrograms

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
REDUCTIONS = "LIBRARY_FUSION_TYPE_REDUCE"
PROCESSORS = ((), ("avx2",), ("avx2", "avx512f"))
SIZES = {"num_groups": 1, "max_blocks_per_req": 4}


def options(
    *, platform="cpu", dtypes=("float32",), num_rows=64, num_cores=1, has=("avx2", "avx512f")
) -> dict[str, str]:
    return compiler_options(
        platform, dtypes, num_rows=num_rows, num_cores=num_cores, instruction_sets=has
    )


def test_xla_takes_the_options_of_this_platform():
    for num_cores, has in itertools.product((1, 2), PROCESSORS):
        found = options(platform=jax.default_backend(), num_cores=num_cores, has=has)
        assert jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile(found) is not None


@pytest.mark.parametrize("num_rows", [0, 8, YNNPACK_MIN_ROWS, 512])
def test_with_avx512_ynnpack_is_left_out_on_one_core_alone(num_rows):
    assert options(num_rows=num_rows)[YNNPACK] == ""
    assert YNNPACK not in options(num_rows=num_rows, num_cores=2)


def test_with_avx2_ynnpack_multiplies_many_rows_on_one_core_alone():
    few, many = YNNPACK_MIN_ROWS - 1, YNNPACK_MIN_ROWS
    assert YNNPACK not in options(num_rows=many, has=["avx2"])
    assert options(num_rows=few, has=["avx2"])[YNNPACK] == REDUCTIONS
    for num_rows in (few, many):
        assert options(num_rows=num_rows, num_cores=2, has=["avx2"])[YNNPACK] == REDUCTIONS


def test_left_out_products_are_xlas_own_and_reductions_may_stay():
    def product_and_reduction(x, w):
        return x @ w, jnp.max(x, axis=1)

    def taken_by_ynnpack(found: dict[str, str]) -> tuple[bool, bool]:
        text = lowered.compile(found).as_text()
        return tuple(
            bool(re.search(rf"= f32\[{shape}\]\S* fusion\(.*__ynn_fusion", text))
            for shape in ("64,512", "64")
        )

    lowered = jax.jit(product_and_reduction).lower(jnp.ones((64, 512)), jnp.ones((512, 512)))
    takes_product, takes_reduction = taken_by_ynnpack({})
    # Or nothing is shown here. XLA has YNNPACK for x86; elsewhere it may leave all to others.
    assert takes_product or "avx2" not in instruction_sets()
    assert taken_by_ynnpack(options(num_cores=2, has=["avx2"])) == (False, takes_reduction)
    assert taken_by_ynnpack(options(num_cores=1)) == (False, False)


def test_other_weights_processors_and_devices_keep_the_default():
    for num_cores in (1, 2):
        assert YNNPACK not in options(dtypes=["float32", "bfloat16"], num_cores=num_cores)
        assert YNNPACK not in options(num_cores=num_cores, has=["asimd"])
        assert YNNPACK not in options(platform="gpu", num_cores=num_cores)


def test_rows_are_those_that_weights_meet_at_once():
    step = {"num_reqs": 8, "num_logits": 8, **SIZES}
    assert product_rows(StepShape(num_tokens=128, widths=(32, 128), **step)) == 128
    assert product_rows(StepShape(num_tokens=128, tile_tokens=32, **step)) == 32
    assert product_rows(BurstShape(max_steps=8, num_reqs=16, widths=(8, 16), **SIZES)) == 16
    assert product_rows(CopyShape(num_copies=64)) == 0


def test_batch_invariant_programs_keep_ynnpack():
    """XLA's own products sum some rows of an array in another order than the rest."""
    for num_rows, num_cores, has in itertools.product((0, 32, 64), (1, 2), PROCESSORS):
        found = compiler_options(
            *("cpu", ["float32"]),
            num_rows=num_rows,
            num_cores=num_cores,
            instruction_sets=has,
            batch_invariant=True,
        )
        assert YNNPACK not in found


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_every_program_is_compiled_with_the_options_of_its_shape(monkeypatch, batch_invariant):
    """And those of a batch-invariant engine with the same ones all."""
    asked = []
    monkeypatch.setattr(warmup, "num_cores", lambda: 1)
    monkeypatch.setattr(warmup, "instruction_sets", lambda: frozenset(["avx2"]))
    buckets = StepBuckets(
        max_num_batched_tokens=64,
        max_num_seqs=8,
        max_decode_burst=8,
        max_model_len=64,
        batch_invariant=batch_invariant,
        **SIZES,
    )
    mesh = device_mesh(jax.devices("cpu")[0])
    params = (jnp.ones((4, 4)),)
    programs = StepPrograms(model=None, params=params, buckets=buckets, max_num_seqs=8, mesh=mesh)
    lowered = SimpleNamespace(compile=lambda found: asked.append(found.get(YNNPACK)))
    for shape in buckets.largest_first:
        programs._finish(shape, lowered)
    wanted = [
        None if batch_invariant or product_rows(shape) >= YNNPACK_MIN_ROWS else REDUCTIONS
        for shape in buckets.largest_first
    ]
    assert asked == wanted
    assert len(set(asked)) == (1 if batch_invariant else 2)
