"""XLA's options of a platform, and which library multiplies float32 on a CPU."""

import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from paxkv.runner.bucketing import BurstShape, CopyShape, StepShape
from paxkv.runner.compiler_options import YNNPACK_MIN_ROWS, compiler_options, product_rows

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
REDUCTIONS = "LIBRARY_FUSION_TYPE_REDUCE"
SIZES = {"num_groups": 1, "max_blocks_per_req": 4}


def options(
    *, platform="cpu", dtypes=("float32",), num_rows=64, num_cores=1, has=("avx2", "avx512f")
) -> dict[str, str]:
    return compiler_options(
        platform, dtypes, num_rows=num_rows, num_cores=num_cores, instruction_sets=has
    )


def test_xla_takes_the_options_of_this_platform():
    for num_cores, has in itertools.product((1, 2), ((), ("avx2",), ("avx2", "avx512f"))):
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


def test_without_its_products_ynnpack_reduces_and_xla_multiplies():
    def products_and_reductions(x, w):
        return x @ w, jnp.max(x, axis=1)

    arrays = jnp.ones((64, 512)), jnp.ones((512, 512))
    lowered = jax.jit(products_and_reductions).lower(*arrays)
    for has, num_cores in (("avx2",), 2), (("avx2", "avx512f"), 1):
        text = lowered.compile(options(num_cores=num_cores, has=has)).as_text()
        product = next(line for line in text.splitlines() if "f32[64,512]{1,0} dot(" in line)
        assert "ynn" not in product
        assert not re.search(r"= f32\[64,512\]\S* fusion\(.*__ynn_fusion", text)


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
