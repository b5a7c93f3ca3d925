"""XLA's options on a CPU, the storage of weights, and the library that multiplies float32."""

import itertools
import re
import time

import jax
import jax.numpy as jnp
import pytest

from models.platforms.cpu import CPU
from models.platforms.processor import instruction_sets

YNNPACK = "xla_cpu_experimental_ynn_fusion_type"
REDUCTIONS = "LIBRARY_FUSION_TYPE_REDUCE"
PROCESSORS = ((), ("avx2",), ("avx2", "avx512f"), ("avx2", "avx512f", "avx512_fp16"))


def options(
    *, dtypes=("float32",), num_cores=1, has=("avx2", "avx512f"), batch_invariant=False
) -> dict[str, str]:
    platform = CPU(num_threads=num_cores, instruction_sets=frozenset(has))
    return platform.compiler_options(dtypes, batch_invariant=batch_invariant)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="compiles for a CPU")
def test_xla_accepts_the_options():
    for num_cores, has in itertools.product((1, 2), PROCESSORS):
        found = options(num_cores=num_cores, has=has)
        assert jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4))).compile(found) is not None


def test_with_avx512_ynnpack_is_left_out_on_one_core_alone():
    assert options(num_cores=1)[YNNPACK] == ""
    assert YNNPACK not in options(num_cores=2)


@pytest.mark.parametrize("num_cores", [1, 2])
def test_with_avx2_alone_ynnpack_does_reductions_and_no_products(num_cores):
    assert options(num_cores=num_cores, has=["avx2"])[YNNPACK] == REDUCTIONS


@pytest.mark.parametrize(
    ("dtype", "num_cores", "has", "wanted"),
    [
        ("float32", 2, ("avx2", "avx512f"), "rows"),
        ("bfloat16", 1, ("avx2", "avx512f"), "rows"),
        # XLA's own products.
        ("float32", 1, ("avx2", "avx512f"), "columns"),
        ("float32", 2, ("avx2",), "columns"),
        # Not measured.
        ("bfloat16", 2, ("avx2",), "columns"),
        ("float32", 2, (), "columns"),
    ],
)
def test_tied_head_lies_as_the_library_that_multiplies_reads_it_best(dtype, num_cores, has, wanted):
    platform = CPU(num_threads=num_cores, instruction_sets=frozenset(has))
    assert platform.tied_head(dtype, quantizes=False, changes_kernels=False) == wanted
    assert platform.tied_head(dtype, quantizes=False, changes_kernels=True) == "copy"
    assert platform.tied_head(dtype, quantizes=True, changes_kernels=False) == "columns"


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
    # Otherwise the test shows nothing: outside of x86, XLA may leave no product to YNNPACK.
    assert takes_product or "avx2" not in instruction_sets()
    assert taken_by_ynnpack(options(num_cores=2, has=["avx2"])) == (False, takes_reduction)
    assert taken_by_ynnpack(options(num_cores=1)) == (False, False)


def test_other_weights_and_processors_keep_the_default():
    for num_cores in (1, 2):
        assert YNNPACK not in options(dtypes=["float32", "bfloat16"], num_cores=num_cores)
        assert YNNPACK not in options(num_cores=num_cores, has=["asimd"])


def test_batch_invariant_programs_keep_ynnpack():
    """XLA's own products sum some rows of an array in another order than the rest."""
    for num_cores, has in itertools.product((1, 2), PROCESSORS):
        assert YNNPACK not in options(num_cores=num_cores, has=has, batch_invariant=True)


def panel_width(*, num_cores=1, has=("sse2", "avx2"), batch_invariant=False) -> int | None:
    platform = CPU(num_threads=num_cores, instruction_sets=frozenset(has))
    return platform.column_panel_width(batch_invariant=batch_invariant)


def test_panels_are_for_one_core_and_wider_with_avx512_fp16():
    assert panel_width() == 256
    assert panel_width(has=["sse2", "avx2", "avx512f", "avx512_fp16"]) == 512


@pytest.mark.parametrize(
    "other",
    [
        {"num_cores": 2},
        {"has": ["sse2"]},
        {"has": ["asimd"]},
        {"has": ["sse2", "avx2", "avx512f"]},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_kernels_stay_whole_where_panels_gain_nothing_or_rows_must_not_depend_on_others(
    other,
):
    assert panel_width(**other) is None


def test_where_panels_are_wanted_ynnpack_does_no_products():
    """It is slow with them."""
    processors = list(itertools.product((1, 2), PROCESSORS))
    wanting = [at for at in processors if panel_width(num_cores=at[0], has=at[1]) is not None]
    assert wanting
    found = [options(num_cores=num_cores, has=has)[YNNPACK] for num_cores, has in wanting]
    assert set(found) <= {"", REDUCTIONS}


def test_halves_are_kept_as_integers():
    """XLA rewrites a scatter of bfloat16 through float32, and copies the cache for it."""
    platform = CPU.of_this_machine()
    for model_dtype in ("float32", "bfloat16"):
        assert platform.kv_cache_dtypes(model_dtype) == ("float32", "float16", "bfloat16")
    stored = {dtype: platform.page_dtype(dtype) for dtype in platform.kv_cache_dtypes("float32")}
    assert stored == {"float32": "float32", "float16": "uint16", "bfloat16": "uint16"}


def test_steps_are_compared_by_processor_time():
    platform = CPU(num_threads=1, instruction_sets=frozenset())
    start_s, start_wall_s = platform.step_clock(), time.perf_counter()
    time.sleep(0.2)
    assert platform.step_clock() - start_s < 0.1 < time.perf_counter() - start_wall_s
