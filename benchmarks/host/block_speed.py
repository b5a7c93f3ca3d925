"""How fast prompts are hashed, and how fast the pool hands blocks out and takes them back.

Tokens a CPU second for each hash algorithm, over prompts of 4,096 tokens in blocks of 16. Blocks a
CPU second that are handed out and freed again, in runs of 256: of a pool where nothing is cached,
and of one where every block that is handed out has to be forgotten first.
"""

import argparse
import random
import statistics
import sys
import time
import typing
from collections.abc import Callable

from benchmarks.command_line import output_file, positive_int, run_benchmark
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from paxkv.config.engine_config import PrefixCachingHashAlgo
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.kv_cache.hashing.block_hash import BlockHasher
from paxkv.kv_cache.pool.block_pool import BlockPool
from paxkv.scheduler.request import Request

BLOCK_SIZE = 16
NUM_PROMPT_TOKENS = 4096
NUM_BLOCKS = 8193
RUN_LENGTH = NUM_PROMPT_TOKENS // BLOCK_SIZE

# Of another engine, measured elsewhere on this kind of machine; not taken again here.
ELSEWHERE = {"sha256": "10 M", "pool": "1.5 M to 5 M"}


def measure_hash(algorithm: PrefixCachingHashAlgo, num_prompts: int) -> float:
    """Tokens a CPU second."""
    rng = random.Random(0)
    tokens = [rng.randrange(150_000) for _ in range(NUM_PROMPT_TOKENS)]
    hasher = BlockHasher(block_size=BLOCK_SIZE, seed="", algorithm=algorithm)

    def run() -> None:
        for _ in range(num_prompts):
            hasher.extend([], tokens)

    return num_prompts * NUM_PROMPT_TOKENS / _cpu_seconds(run)


def measure_pool(num_runs: int) -> float:
    """Blocks a CPU second that are handed out and freed, where nothing is cached."""
    pool = BlockPool(num_blocks=NUM_BLOCKS, enable_caching=True)

    def run() -> None:
        for _ in range(num_runs):
            pool.free_blocks(reversed(pool.get_new_blocks(RUN_LENGTH)))

    return num_runs * RUN_LENGTH / _cpu_seconds(run)


def measure_cached_pool(num_runs: int) -> float:
    """The same where each block is cached, freed, and forgotten when it is handed out again."""
    pool = BlockPool(num_blocks=NUM_BLOCKS, enable_caching=True)
    rng = random.Random(0)
    hasher = BlockHasher(block_size=BLOCK_SIZE, seed="")
    # More prompts than the pool holds: none is found again.
    requests = [
        Request(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=[rng.randrange(150_000) for _ in range(NUM_PROMPT_TOKENS)],
                sampling_params=SamplingParams(),
            ),
            max_num_tokens=NUM_PROMPT_TOKENS + 1,
            block_hasher=hasher,
        )
        for index in range(NUM_BLOCKS // RUN_LENGTH + 1)
    ]

    def run(num_runs: int) -> None:
        for index in range(num_runs):
            blocks = pool.get_new_blocks(RUN_LENGTH)
            pool.cache_full_blocks(
                request=requests[index % len(requests)],
                blocks=blocks,
                num_cached_blocks=0,
                num_full_blocks=RUN_LENGTH,
                block_size=BLOCK_SIZE,
                kv_cache_group_id=0,
            )
            pool.free_blocks(reversed(blocks))

    run(len(requests))  # every block of the pool is cached now
    return num_runs * RUN_LENGTH / _cpu_seconds(lambda: run(num_runs))


def _cpu_seconds(run: Callable[[], None]) -> float:
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.block_speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--num-repetitions", type=positive_int, default=9)
    parser.add_argument(
        "--num-runs", type=positive_int, default=100, help="prompts or runs a repetition"
    )
    parser.add_argument(
        "--out", type=output_file, default=str(RESULTS_FOLDER / "block_speed.jsonl")
    )
    arguments = parser.parse_args()
    num_runs = arguments.num_runs
    cases: dict[str, tuple[str, Callable[[], float], str | None]] = {
        f"hash algorithm={name}": (
            "tokens_per_cpu_s",
            lambda name=name: measure_hash(name, num_runs),
            ELSEWHERE.get(name),
        )
        for name in typing.get_args(PrefixCachingHashAlgo)
    }
    pool = "blocks_per_cpu_s"
    cases["pool get+free"] = (pool, lambda: measure_pool(num_runs), ELSEWHERE["pool"])
    cases["pool get+cache+free"] = (pool, lambda: measure_cached_pool(num_runs), None)
    print(f"{'million a CPU second':<28} {'median':>8} {'min':>8} {'max':>8}   elsewhere")
    rows: list[ResultRow] = []
    for case, (metric, measure, elsewhere) in cases.items():
        values = [measure() for _ in range(arguments.num_repetitions)]
        median, low, high = (f(values) / 1e6 for f in (statistics.median, min, max))
        print(f"{case:<28} {median:>8.2f} {low:>8.2f} {high:>8.2f}   {elsewhere or ''}", flush=True)
        rows.append(
            ResultRow(
                benchmark="benchmarks.host.block_speed",
                case=f"{case} num_runs={num_runs}",
                metric=metric,
                values=values,
                device=processor_name(),
            )
        )
    append_rows(rows, arguments.out)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
