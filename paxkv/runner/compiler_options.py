"""What XLA is told when it compiles a program."""

from collections.abc import Collection

from paxkv.runner.bucketing import BurstShape, ProgramShape, StepShape

# On one core without AVX-512, YNNPACK is quicker from so many rows on.
YNNPACK_MIN_ROWS = 64
# What YNNPACK does; XLA's default is more than that. Reductions by it compile in less time.
_YNNPACK_DOES = "xla_cpu_experimental_ynn_fusion_type"
_NOTHING, _REDUCTIONS = "", "LIBRARY_FUSION_TYPE_REDUCE"


def compiler_options(
    platform: str,
    dtypes: Collection[str],
    *,
    num_rows: int,
    num_cores: int,
    instruction_sets: Collection[str],
    batch_invariant: bool = False,
) -> dict[str, str]:
    """Names and values of XLA's options.

    Args:
        dtypes: Of the model's weights.
        num_rows: As of `product_rows`, of the program's shape.
        num_cores: Of the processor, as many as this process may use.
        instruction_sets: Of the processor, as of `paxkv/runner/processor.py`.
        batch_invariant: A row's products must not depend on its place among the others. XLA's own
            sum some rows in another order; YNNPACK does not.
    """
    if platform == "cpu":
        # Of the levels 0 to 3, 2 if nobody says. With 1 programs compile in 0.85 of the time, and
        # steps take 0.96 of it; with 0 steps take 2.6 times as long (hidden 512, JAX 0.10.2).
        options = {"xla_backend_optimization_level": "1"}
        if set(dtypes) == {"float32"} and not batch_invariant:
            options |= _float32_products(num_rows, num_cores, instruction_sets)
        return options
    if platform == "gpu":
        # What XLA puts into CUDA graphs by itself, and loops: so that the host launches a burst
        # once, and does not wait for the loop's condition.
        return {
            "xla_gpu_enable_command_buffer": "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
            "DYNAMIC_SLICE_FUSION,FUSION,WHILE"
        }
    return {}


def product_rows(shape: ProgramShape) -> int:
    """Most rows of a program's products with the layers' weights; 0 where it has none."""
    match shape:
        case StepShape():
            return shape.tile_tokens or shape.num_tokens
        case BurstShape():
            return shape.num_reqs
        case _:
            return 0


def _float32_products(
    num_rows: int, num_cores: int, instruction_sets: Collection[str]
) -> dict[str, str]:
    """Leaves out products by YNNPACK where XLA's own take less time.

    Time by YNNPACK over that by XLA's own, with JAX 0.10.2 and 0.12.0.1. Where a core does more
    than AVX2 can (160 GFLOP/s), and hidden 512: on one core 1.3 to 1.5 with 64 rows and 1.1 to 1.3
    with 256; on two 0.7 to 0.8 with 256, about the same with fewer. With AVX2 and hidden 512 or
    1,024, all of a model's products in turn: on one core 0.54 to 0.91 with 64 rows, 0.63 to 0.84
    with 128 to 512, 0.96 to 1.35 with 8 to 48; on two 1.1 to 1.5 with 8 to 48, 0.94 to 1.15 with
    more. Processors with neither were not measured. A program of several widths counts as its
    largest, which full batches take.
    """
    if "avx512f" in instruction_sets:
        return {_YNNPACK_DOES: _NOTHING} if num_cores == 1 else {}
    if "avx2" in instruction_sets and (num_cores > 1 or num_rows < YNNPACK_MIN_ROWS):
        return {_YNNPACK_DOES: _REDUCTIONS}
    return {}
