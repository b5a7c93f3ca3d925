"""The CPU half of `python -m benchmarks.ops`: XLA's attention, experts and scatter on one core.

Every body is checked against float64 before it is timed. Then paxkv's attention, torch's attention
on contiguous keys and values (if torch is installed) and a sequential read of the same number of
bytes run in turn in one process. The time of the read is the lower limit.
"""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from benchmarks.ops import cpu_experts
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
    build_cache,
    holds_what_was_written,
    scatter_call,
)
from benchmarks.ops.cpu_timing import Call, SequentialReads, one_core, ratios, sample_in_turn
from benchmarks.ops.cpu_torch_sdpa import HAS_TORCH, sdpa_call, tokens_of, use_one_thread
from benchmarks.result_rows import ResultRow, append_rows, processor_name

_READ, _SDPA = "sequential read", "torch SDPA"


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSizes:
    """Amounts of work.

    Args:
        bytes_in_turn: Bytes read between two reads of the same data; more than the last cache level
            holds.
    """

    num_samples: int
    block_sizes: tuple[int, ...]
    bytes_in_turn: int
    read_buffer_bytes: int
    scatter_bytes: tuple[int, ...]
    experts: cpu_experts.ExpertSizes
    num_experts: tuple[int, ...]


FULL = CpuSizes(
    num_samples=15,
    block_sizes=(16, 64),
    bytes_in_turn=256 << 20,
    read_buffer_bytes=512 << 20,
    scatter_bytes=(102 << 20, 410 << 20, 1 << 30, 4 << 30),
    experts=cpu_experts.FULL,
    num_experts=(8, 128),
)
QUICK = CpuSizes(
    num_samples=5,
    block_sizes=(64,),
    bytes_in_turn=96 << 20,
    read_buffer_bytes=256 << 20,
    scatter_bytes=(102 << 20, 1 << 30),
    experts=cpu_experts.FULL,
    num_experts=(8, 128),
)


def run_cpu(*, quick: bool, out: Path | None) -> int:
    """Checks and times bodies, prints a table, and appends one row per figure to `out`, if given.

    Returns:
        The exit code: 1 if a result was wrong. Bodies with wrong results are not timed.
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
    rows += _measure_experts(sizes, failures)
    rows += _measure_scatter(sizes, failures)
    for failure in failures:
        print(f"WRONG: {failure}")
    if out is not None:
        append_rows(rows, out)
        print(f"{len(rows)} rows appended to {out}")
    return 1 if failures else 0


def _measure_batch(
    batch: CpuBatch, sizes: CpuSizes, reads: SequentialReads, failures: list[str]
) -> list[ResultRow]:
    num_rows = int(np.clip(-(-sizes.bytes_in_turn // batch.kv_bytes), 2, 16))
    calls: dict[str, Call] = {}
    for block_size in sizes.block_sizes:
        data = build_paged_data(batch, num_rows=num_rows, block_size=block_size)
        name = f"{batch.name}, block {block_size}, default"
        call = paged_call(data)
        row = num_rows - 1
        error = relative_error(data, call(row), row)
        if error > MAX_RELATIVE_ERROR:
            failures.append(f"{name}: relative error {error:.1e}, allowed {MAX_RELATIVE_ERROR}")
        else:
            calls[name] = call
    ours = list(calls)
    calls[_READ] = reads.call(batch.kv_bytes)
    if HAS_TORCH:
        calls[_SDPA] = _checked_sdpa(data, num_rows, failures)
    seconds = sample_in_turn(calls, num_data_sets=num_rows, num_samples=sizes.num_samples)
    floor = seconds[_READ]
    _print_line(f"{batch.name}, {_READ}", seconds=floor, num_bytes=batch.kv_bytes)
    if HAS_TORCH:
        _print_line(f"{batch.name}, {_SDPA}", seconds[_SDPA], batch.kv_bytes, floor)
    rows = [_row(f"{batch.name}, {_READ}", "ms", [1e3 * s for s in floor])]
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


def _measure_experts(sizes: CpuSizes, failures: list[str]) -> list[ResultRow]:
    calls: dict[str, Call] = {}
    products = cpu_experts.build_products(sizes.experts, sizes.num_experts)
    for product in products:
        name = (
            f"experts: {sizes.experts.num_rows} rows hit {sizes.experts.num_hit} of "
            f"{product.num_experts}, {sizes.experts.in_features} to {sizes.experts.out_features}"
        )
        call = cpu_experts.expert_call(product)
        error = cpu_experts.relative_error(product, call(0))
        if error > cpu_experts.MAX_RELATIVE_ERROR:
            failures.append(f"{name}: relative error {error:.1e}")
        else:
            calls[name] = call
    if not calls:
        return []
    # One product is short, so there are many samples of a few calls each.
    seconds = sample_in_turn(calls, num_data_sets=4, num_samples=4 * sizes.num_samples)
    return _compare(seconds, "experts", unit="ms", per_s=1e3, metric="times_fewest_experts")


def _measure_scatter(sizes: CpuSizes, failures: list[str]) -> list[ResultRow]:
    calls: dict[str, Call] = {}
    for num_bytes in sizes.scatter_bytes:
        name = f"scatter of {NUM_TOKENS} tokens, cache of {num_bytes / 2**30:.2f} GiB"
        if num_bytes > _free_bytes() // 2:
            print(f"{name}: skipped, only {_free_bytes() / 2**30:.1f} GiB of memory are free")
            continue
        cache = build_cache(num_bytes)
        call = scatter_call(cache)
        for row in range(NUM_ROWS):
            call(row)
        if holds_what_was_written(cache):
            calls[name] = call
        else:
            failures.append(f"{name}: the cache differs from what was written")
    if not calls:
        return []
    seconds = sample_in_turn(calls, num_data_sets=NUM_ROWS, num_samples=4 * sizes.num_samples)
    return _compare(seconds, "scatter", unit="us", per_s=1e6, metric="times_smallest_cache")


def _compare(
    seconds: dict[str, list[float]], what: str, *, unit: str, per_s: float, metric: str
) -> list[ResultRow]:
    """Prints samples and their ratios to the first call's samples; `metric` names the ratios."""
    first = next(iter(seconds.values()))
    rows = []
    print(f"{what:<78} {unit:>7} {'/ first':>10}")
    for name, taken in seconds.items():
        over_first = ratios(taken, first)
        times = [per_s * s for s in taken]
        median = statistics.median(times)
        print(f"{name:<78} {median:>7.2f} {statistics.median(over_first):>10.2f}")
        rows.append(_row(name, unit, times))
        rows.append(_row(name, metric, over_first))
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
