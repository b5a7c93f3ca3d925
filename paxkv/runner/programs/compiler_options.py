"""What XLA is told when it compiles a program, and how weights are to lie for it."""

from collections.abc import Collection

# What YNNPACK does; XLA's default is more than that. Reductions by it compile in less time.
_YNNPACK_DOES = "xla_cpu_experimental_ynn_fusion_type"
_NOTHING, _REDUCTIONS = "", "LIBRARY_FUSION_TYPE_REDUCE"
_VECTOR_BITS = "xla_cpu_prefer_vector_width"


def compiler_options(
    platform: str,
    dtypes: Collection[str],
    *,
    num_cores: int,
    instruction_sets: Collection[str],
    batch_invariant: bool = False,
) -> dict[str, str]:
    """Names and values of XLA's options.

    Args:
        dtypes: Of the model's weights.
        num_cores: Of the processor, as many as XLA computes with.
        instruction_sets: Of the processor, as of `paxkv/runner/programs/processor.py`.
        batch_invariant: A row's products must not depend on its place among the others. XLA's own
            sum some rows in another order; YNNPACK does not.
    """
    if platform == "cpu":
        # Of the levels 0 to 3, 2 if nobody says. With 1 programs compile in 0.85 of the time, and
        # steps take 0.96 of it; with 0 steps take 2.6 times as long (hidden 512, JAX 0.10.2).
        options = {"xla_backend_optimization_level": "1"}
        # XLA's own loops use half of a register of 512 bits if nobody says. With all of it, 64
        # mixed requests, hidden 512, tokens a CPU-second: in float32 as many on one core and 1.02
        # to 1.08 times as many on two (JAX 0.10.2), on one with products in int8 and keys in
        # float16 1.04 to 1.06 (0.12.0.1). Processors without avx512_fp16, some of which slow down
        # for such instructions, were not measured.
        if "avx512_fp16" in instruction_sets and not batch_invariant:
            options[_VECTOR_BITS] = "512"
        if set(dtypes) == {"float32"} and not batch_invariant:
            options |= _float32_products(num_cores, instruction_sets)
        return options
    if platform == "gpu":
        # What XLA puts into CUDA graphs by itself, and loops: so that the host launches a burst
        # once, and does not wait for the loop's condition.
        return {
            "xla_gpu_enable_command_buffer": "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,"
            "DYNAMIC_SLICE_FUSION,FUSION,WHILE"
        }
    return {}


def column_panel_width(
    platform: str, *, num_cores: int, instruction_sets: Collection[str], batch_invariant: bool
) -> int | None:
    """Columns of the panels that float32 kernels are to lie in (`split_columns`).

    None leaves kernels whole: where several cores share the columns of each, where YNNPACK
    multiplies, which is slow with panels, and where they gain nothing. With avx512_fp16, hidden
    512, 64 mixed requests and one busy core, panels of 512 columns made 1.04 times the tokens a
    CPU-second and of 256 1.03, before huge pages made more of it; with AVX2 alone 256 were
    measured. With AVX-512 and without avx512_fp16 (AMD family 25 model 17) panels of 512 made
    1.01 times as many of 64 requests, as many of 16, and 0.93 times as many of a single one.
    """
    if platform != "cpu" or num_cores > 1 or batch_invariant:
        return None
    if "avx512f" in instruction_sets:
        return 512 if "avx512_fp16" in instruction_sets else None
    return 256 if "avx2" in instruction_sets else None


def max_looped_tokens(
    platform: str, *, num_cores: int, instruction_sets: Collection[str], batch_invariant: bool
) -> int:
    """Most tokens whose products of float32 take less time as loops (`multiply_few_rows`).

    Decode steps, hidden 512, one core with avx512_fp16, JAX 0.10.2: with 8 requests 13.4 ms instead
    of 22.4, with 16 19.6 instead of 26.8, with 32 31.7 instead of 35.9.

    Without avx512_fp16 programs use registers of 256 bits (above). With AVX-512 (AMD family 25
    model 17) products then take 0.66 of the time with 8 tokens and 0.83 with 16 (hidden 1,024:
    0.64 and 0.8), no less with 32, and 16 mixed requests have 1.14 times the tokens a CPU-second.
    With AVX2 alone, which has half as many registers, nothing was measured.

    A loop is code for every kernel and every number of tokens: the engine takes 37 s of CPU time
    to start the first time instead of 31, and 2.7 instead of 1.5 where programs are found compiled.
    """
    if platform != "cpu" or num_cores > 1 or batch_invariant:
        return 0
    if "avx512_fp16" in instruction_sets:
        return 32
    return 16 if "avx512f" in instruction_sets else 0


def _float32_products(num_cores: int, instruction_sets: Collection[str]) -> dict[str, str]:
    """Leaves out products by YNNPACK where XLA's own take less time.

    Time by YNNPACK over that by XLA's own, with JAX 0.10.2 and 0.12.0.1. Where a core does more
    than AVX2 can (160 GFLOP/s), and hidden 512: on one core 1.3 to 1.5 with 64 rows and 1.1 to 1.3
    with 256; on two 0.7 to 0.8 with 256, about the same with fewer. With AVX2 and hidden 512 or
    1,024, all of a model's products in turn, on two cores: 1.1 to 1.5 with 8 to 48, 0.94 to 1.15
    with more. On one core with AVX2 wide kernels lie in panels, which YNNPACK is slow with
    (`column_panel_width`); the others would take 0.5 to 0.9 of the time with it from 64 rows on.
    Processors with neither were not measured.
    """
    if "avx512f" in instruction_sets:
        return {_YNNPACK_DOES: _NOTHING} if num_cores == 1 else {}
    if "avx2" in instruction_sets:
        return {_YNNPACK_DOES: _REDUCTIONS}
    return {}
