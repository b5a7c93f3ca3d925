"""The CPU half of `python -m benchmarks.ops`: attention and scatter as plain XLA, on one core.

Every body is checked against float64 before it is timed. Then, in turn and in one process: our
attention, torch's on keys and values that lie in one piece already (if torch is there), and a
sequential read of as many bytes, which is the floor.
"""

import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks.ops.cpu_attention import (
    MAX_RELATIVE_ERROR,
    CpuBatch,
    PagedData,
    batches,
    build_paged_data,
    paged_call,
    relative_error,
)
from benchmarks.ops.cpu_scatter import (
    NUM_ROWS,
    NUM_TOKENS,
    build_caches,
    holds_what_was_written,
    scatter_call,
)
from benchmarks.ops.cpu_timing import (
    Call,
    SequentialReads,
    fastest,
    one_core,
    ratios,
    sample_in_turn,
)
from benchmarks.ops.cpu_torch_sdpa import (
    HAS_TORCH,
    read_with_torch,
    sdpa_call,
    tokens_of,
    use_one_thread,
)
from benchmarks.result_rows import ResultRow, append_rows, processor_name

_READS = ("read by NumPy", "read by torch")
_SDPA = "torch SDPA"
# As `jax.jit` compiles without a word, and with small products left to Eigen.
COMPILER_OPTIONS: dict[str, dict[str, str]] = {
    "default": {},
    "YNNPACK off": {"xla_cpu_experimental_ynn_fusion_type": ""},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSizes:
    """How much of everything."""

    num_samples: int
    block_sizes: tuple[int, ...]
    # Data that is gone through between two reads of the same: more than the last cache level holds.
    bytes_in_turn: int
    read_buffer_bytes: int
    scatter_bytes: tuple[int, ...]


FULL = CpuSizes(
    num_samples=15,
    block_sizes=(16, 64),
    bytes_in_turn=256 << 20,
    read_buffer_bytes=512 << 20,
    scatter_bytes=(102 << 20, 410 << 20, 1 << 30, 4 << 30),
)
QUICK = CpuSizes(
    num_samples=5,
    block_sizes=(64,),
    bytes_in_turn=96 << 20,
    read_buffer_bytes=256 << 20,
    scatter_bytes=(102 << 20, 1 << 30),
)


def run_cpu(*, quick: bool, out: Path | None) -> int:
    """Checks and times; prints a table and appends a row a figure to `out`, if given.

    Returns:
        The exit status: 1 if a result was wrong, and then that body was not timed.
    """
    with one_core(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        return run_sizes(QUICK if quick else FULL, batches(), out)


def run_sizes(sizes: CpuSizes, all_batches: tuple[CpuBatch, ...], out: Path | None) -> int:
    """`run_cpu` for given sizes and batches."""
    use_one_thread()
    rows: list[ResultRow] = []
    failures: list[str] = []
    print(f"{processor_name()}, one core, JAX {jax.__version__}, f32, 8/4 heads, head_dim 64")
    if not HAS_TORCH:
        print("torch is not installed: no ratios to its SDPA.")
    print(f"{'attention':<78} {'ms':>7} {'GB/s':>6} {'of read':>8} {'/ SDPA':>7}")
    reads = SequentialReads(sizes.read_buffer_bytes)
    for batch in all_batches:
        rows += _measure_batch(batch, sizes, reads, failures)
    rows += _measure_scatter(sizes, failures)
    for failure in failures:
        print(f"WRONG: {failure}")
    if out is not None:
        append_rows(rows, out)
        print(f"{len(rows)} rows appended to {out}")
    return 1 if failures else 0


def _layouts(batch: CpuBatch, sizes: CpuSizes) -> Iterator[tuple[str, dict[str, int | bool]]]:
    """What is said of a layout of the batch, and the arguments that build it."""
    for block_size in sizes.block_sizes:
        yield f"block {block_size}", {"block_size": block_size}
    if batch.max_query_len == 1:
        largest = sizes.block_sizes[-1]
        # The blocks are the same, so the cost should be too.
        wide = {"block_size": largest, "columns_per_needed": 8}
        yield f"block {largest}, tables 8 times as wide", wide
        yield f"block {largest}, in order", {"block_size": largest, "is_in_order": True}


def _measure_batch(
    batch: CpuBatch, sizes: CpuSizes, reads: SequentialReads, failures: list[str]
) -> list[ResultRow]:
    num_rows = int(np.clip(-(-sizes.bytes_in_turn // batch.kv_bytes), 2, 16))
    calls: dict[str, Call] = {}
    for layout, arguments in _layouts(batch, sizes):
        data = build_paged_data(batch, num_rows=num_rows, **arguments)
        for setting, compiler_options in COMPILER_OPTIONS.items():
            name = f"{batch.name}, {layout}, {setting}"
            call = paged_call(data, compiler_options)
            row = num_rows - 1
            error = relative_error(data, call(row), row)
            if error > MAX_RELATIVE_ERROR:
                failures.append(f"{name}: relative error {error:.1e}, allowed {MAX_RELATIVE_ERROR}")
            else:
                calls[name] = call
        if HAS_TORCH and _SDPA not in calls:
            calls[_SDPA] = _checked_sdpa(data, num_rows, failures)
    ours = [name for name in calls if name != _SDPA]
    calls[_READS[0]] = reads.call(batch.kv_bytes)
    if HAS_TORCH:
        calls[_READS[1]] = reads.call(batch.kv_bytes, read_with_torch)
    seconds = sample_in_turn(calls, num_data_sets=num_rows, num_samples=sizes.num_samples)
    floor = fastest(seconds, _READS)
    _print_line(f"{batch.name}, sequential read", seconds=floor, num_bytes=batch.kv_bytes)
    if HAS_TORCH:
        _print_line(f"{batch.name}, {_SDPA}", seconds[_SDPA], batch.kv_bytes, floor)
    rows = [_row(f"{batch.name}, sequential read", "ms", [1e3 * s for s in floor])]
    for name in ours:
        taken = seconds[name]
        _print_line(name, taken, batch.kv_bytes, floor, seconds.get(_SDPA))
        rows.append(_row(name, "ms", [1e3 * s for s in taken]))
        rows.append(_row(name, "share_of_read_bandwidth", ratios(floor, taken)))
        if HAS_TORCH:
            rows.append(_row(name, "times_torch_sdpa", ratios(taken, seconds[_SDPA])))
    return rows


def _checked_sdpa(data: PagedData, num_rows: int, failures: list[str]) -> Call:
    call = sdpa_call(data, num_rows)
    error = relative_error(data, tokens_of(data, call(0)), 0)
    if error > MAX_RELATIVE_ERROR:
        failures.append(f"{data.batch.name}, {_SDPA}: relative error {error:.1e}: unfair peer")
    return call


def _measure_scatter(sizes: CpuSizes, failures: list[str]) -> list[ResultRow]:
    calls: dict[str, Call] = {}
    for num_bytes in sizes.scatter_bytes:
        name = f"scatter of {NUM_TOKENS} tokens, caches of {num_bytes / 2**30:.2f} GiB"
        if num_bytes > _free_bytes() // 2:
            print(f"{name}: left out, {_free_bytes() / 2**30:.1f} GiB of memory are free")
            continue
        caches = build_caches(num_bytes)
        call = scatter_call(caches)
        for row in range(NUM_ROWS):
            call(row)
        if holds_what_was_written(caches):
            calls[name] = call
        else:
            failures.append(f"{name}: the caches do not hold what was written, or hold more")
    if not calls:
        return []
    seconds = sample_in_turn(calls, num_data_sets=NUM_ROWS, num_samples=4 * sizes.num_samples)
    smallest = next(iter(seconds.values()))
    rows = []
    print(f"{'scatter':<78} {'us':>7} {'/ smallest':>10}")
    for name, taken in seconds.items():
        over_smallest = ratios(taken, smallest)
        us = [1e6 * s for s in taken]
        print(f"{name:<78} {statistics.median(us):>7.1f} {statistics.median(over_smallest):>10.2f}")
        rows.append(_row(name, "us", us))
        rows.append(_row(name, "times_smallest_cache", over_smallest))
    return rows


def _free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _print_line(
    name: str,
    seconds: list[float],
    num_bytes: int,
    floor: list[float] | None = None,
    peer: list[float] | None = None,
) -> None:
    median = statistics.median(seconds)
    line = f"{name:<78} {1e3 * median:>7.2f} {num_bytes / median / 1e9:>6.1f}"
    if floor is not None:
        line += f" {100 * statistics.median(ratios(floor, seconds)):>6.0f} %"
    if peer is not None:
        line += f" {statistics.median(ratios(seconds, peer)):>7.2f}"
    print(line, flush=True)


def _row(case: str, metric: str, values: list[float]) -> ResultRow:
    return ResultRow(
        benchmark="benchmarks.ops",
        case=case,
        metric=metric,
        values=values,
        device=f"{processor_name()}, one core",
    )
