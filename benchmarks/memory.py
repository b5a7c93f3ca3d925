"""KV memory: the share of allocated positions that hold no token, paged and contiguous.

    python -m benchmarks.memory

Runs the engine's scheduler and block pool until every request is finished. Tokens are drawn on the
host, so the figures are exact and need no device. After each step, it counts over all running
requests:

    paged       positions of the blocks that they hold, a shared block once, compared with positions
                that hold a computed token; for each of --block-sizes
    contiguous  positions that a cache with one piece of memory per request would reserve, compared
                with the tokens of each request; the piece has one of three sizes:
                  max_model_len    2,048 positions, the only safe choice for unknown output lengths
                  power of two     the next power of two above the request's final length
                  exact            the final length, which no server knows: this is a bound

Waste is 1 - used / allocated, both summed over all steps. Contiguous figures omit external
fragmentation, which can only add waste.

Length distributions (the first four are workloads of benchmarks/workloads.py):

    mixed        prompts of 32 to 256 tokens, outputs of 32 to 128
    skewed       prompts of 32 to 128 tokens, few long outputs (192 to 256) among short (8 to 32)
    uniform-256  256 requests, prompts and outputs of 100 to 1,024 tokens
    prefix       512 shared tokens and 32 of each request's own, outputs of 16
    chat         log-normal: prompts around 100 tokens, outputs around 200, both with a long tail
    long         prompts of 500 to 1,500 tokens, outputs of 16 to 512; a third share a prefix

Waste does not show what sharing saves. Two more figures do: paging's memory in percent of the
memory of pieces of max_model_len, and the mean number of running requests in a pool of
--pool-tokens positions. `python -m benchmarks.report` plots the rows.
"""

import argparse
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from benchmarks.command_line import (
    output_file,
    positive_int,
    run_benchmark,
    seed_number,
    whole_number,
)
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from benchmarks.workloads import make_workload
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_output import SchedulerStats
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.scheduler.scheduler import Scheduler

VOCAB_SIZE = 32_000
MAX_MODEL_LEN = 2048
MAX_PROMPT_LEN = 1500
MAX_NUM_SEQS = 256
# Name of a scheme -> function from a request's final length to the positions reserved for it.
RESERVATIONS: Mapping[str, Callable[[int], int]] = {
    "contiguous max_model_len": lambda num_tokens: MAX_MODEL_LEN,
    "contiguous power of two": lambda num_tokens: 1 << (num_tokens - 1).bit_length(),
    "contiguous exact": lambda num_tokens: num_tokens,
}
_WORKLOADS = ("mixed", "skewed", "uniform-256", "prefix")
DISTRIBUTIONS = (*_WORKLOADS, "chat", "long")


def make_scheduler(block_size: int, num_tokens_in_pool: int, *, max_num_seqs: int) -> Scheduler:
    """A scheduler of one attention layer, with a pool of `num_tokens_in_pool` positions."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=64, dtype="float32")
    return Scheduler(
        scheduler_config=SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=2048),
        cache_config=CacheConfig(block_size=block_size),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_tokens_in_pool // block_size + 1,
            kv_cache_groups=(KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=spec),),
        ),
        max_model_len=MAX_MODEL_LEN,
    )


def make_requests(num_requests: int, min_tokens: int, seed: int) -> list[EngineRequest]:
    """Prompts of `min_tokens` to 1,500 tokens, outputs of 16 to 512; one third share 512 tokens."""
    rng = random.Random(seed)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(512)]
    requests = []
    for index in range(num_requests):
        length = rng.randint(min_tokens, MAX_PROMPT_LEN)
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(length)]
        if index % 3 == 0:
            tokens[: len(shared)] = shared[:length]
        params = SamplingParams(max_tokens=rng.randint(16, 512), temperature=0.0)
        requests.append(
            EngineRequest(request_id=str(index), prompt_token_ids=tokens, sampling_params=params)
        )
    return requests


def answer(output: SchedulerOutput, scheduler: Scheduler, rng: random.Random) -> ModelRunnerOutput:
    """One random token for each request whose tokens are all computed in this step."""
    req_ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[req_id] for req_id in req_ids]
    is_done = [request.num_computed_tokens == request.num_tokens for request in requests]
    return ModelRunnerOutput(
        req_ids=req_ids,
        sampled_token_ids=[[rng.randrange(VOCAB_SIZE)] if done else [] for done in is_done],
        logprobs=[None] * len(req_ids),
    )


def run_steps(
    scheduler: Scheduler, requests: Sequence[EngineRequest], seed: int
) -> Iterator[SchedulerStats]:
    """Runs requests until all are finished; yields the scheduler's statistics after each step."""
    for request in requests:
        scheduler.add_request(request)
    rng = random.Random(seed)
    while scheduler.has_unfinished_requests():
        output = scheduler.schedule()
        scheduler.update_from_output(output, answer(output, scheduler, rng))
        yield scheduler.make_stats()
    scheduler.check_invariants()


def make_distribution(name: str, seed: int) -> list[EngineRequest]:
    """The requests of a distribution in `DISTRIBUTIONS`."""
    if name == "long":
        return make_requests(200, 500, seed)
    if name == "chat":
        lengths = _chat_lengths(200, seed)
        rng = random.Random(seed)
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(num_in)] for num_in, _ in lengths]
        return _engine_requests(prompts, [num_out for _, num_out in lengths])
    workload = make_workload(name, vocab_size=VOCAB_SIZE, seed=seed)
    return _engine_requests(
        [request.prompt_token_ids for request in workload.requests],
        [request.num_output_tokens for request in workload.requests],
    )


def _chat_lengths(num_requests: int, seed: int) -> list[tuple[int, int]]:
    """Tokens of prompts and outputs; both together fit `MAX_MODEL_LEN`."""
    rng = random.Random(seed)
    return [
        (
            min(1000, max(4, round(100 * rng.lognormvariate(0, 1.0)))),
            min(1000, max(4, round(200 * rng.lognormvariate(0, 0.8)))),
        )
        for _ in range(num_requests)
    ]


def _engine_requests(
    prompts: Sequence[list[int]], output_lengths: Sequence[int]
) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=prompt,
            sampling_params=SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True),
        )
        for index, (prompt, num_out) in enumerate(zip(prompts, output_lengths, strict=True))
    ]


def measure(
    requests: Sequence[EngineRequest], *, block_size: int, pool_tokens: int, seed: int
) -> dict[str, float]:
    """Waste in percent of paging ("paged") and of each scheme in `RESERVATIONS`.

    Also "memory", the memory of paging in percent of the first scheme's, and "requests at once",
    the mean number of running requests.
    """
    scheduler = make_scheduler(block_size, pool_tokens, max_num_seqs=MAX_NUM_SEQS)
    reserved_of = {
        request.request_id: [reserve(_num_tokens(request)) for reserve in RESERVATIONS.values()]
        for request in requests
    }
    num_allocated = num_used = num_held = 0
    num_reserved = [0] * len(RESERVATIONS)
    num_running: list[int] = []
    for stats in run_steps(scheduler, requests, seed):
        num_allocated += stats.num_allocated_slots
        num_used += stats.num_used_slots
        for request in scheduler.running:
            # A contiguous cache shares nothing: each request holds all its tokens itself.
            num_held += request.num_computed_tokens
            for index, num_positions in enumerate(reserved_of[request.request_id]):
                num_reserved[index] += num_positions
        if stats.num_running_reqs:
            num_running.append(stats.num_running_reqs)
    contiguous = [100 * (1 - num_held / num_positions) for num_positions in num_reserved]
    return {
        "paged": 100 * (1 - num_used / num_allocated),
        **dict(zip(RESERVATIONS, contiguous, strict=True)),
        "memory": 100 * num_allocated / num_reserved[0],
        "requests at once": statistics.fmean(num_running),
    }


def _num_tokens(request: EngineRequest) -> int:
    """Positions that prompt and output fill when the request is finished."""
    return len(request.prompt_token_ids) + (request.sampling_params.max_tokens or 0)


def measure_distribution(
    name: str, *, block_sizes: Sequence[int], pool_tokens: int, seeds: Sequence[int]
) -> dict[str, list[float]]:
    """Figures of a distribution by name, one value per seed.

    All figures except paging's waste come from the run with the first block size.
    """
    figures: dict[str, list[float]] = {}
    for seed in seeds:
        requests = make_distribution(name, seed)
        for block_size in block_sizes:
            run = measure(requests, block_size=block_size, pool_tokens=pool_tokens, seed=seed)
            run[paged_name(block_size)] = run.pop("paged")
            if block_size != block_sizes[0]:
                run = {paged_name(block_size): run[paged_name(block_size)]}
            for key, value in run.items():
                figures.setdefault(key, []).append(value)
    return figures


def paged_name(block_size: int) -> str:
    return f"paged, blocks of {block_size}"


def result_rows(
    figures: Mapping[str, Mapping[str, Sequence[float]]], arguments: argparse.Namespace
) -> list[ResultRow]:
    metrics = {
        "memory": "paged_memory_percent_of_max_model_len",
        "requests at once": "requests_at_once",
    }
    return [
        ResultRow(
            benchmark="benchmarks.memory",
            case=f"lengths={distribution} pool_tokens={arguments.pool_tokens} "
            f"max_model_len={MAX_MODEL_LEN} seeds={arguments.seeds} scheme="
            + (paged_name(arguments.block_sizes[0]) if name in metrics else name),
            metric=metrics.get(name, "waste_percent"),
            values=values,
            device=processor_name(),
        )
        for distribution, by_name in figures.items()
        for name, values in by_name.items()
    ]


def table(
    figures: Mapping[str, Mapping[str, Sequence[float]]],
    *,
    block_sizes: Sequence[int],
    pool_tokens: int,
) -> str:
    """Medians as Markdown."""
    names = [*RESERVATIONS, *map(paged_name, block_sizes)]
    last = ("memory, % of max_model_len's", "requests at once (max_model_len)")
    lines = []
    for distribution, by_name in figures.items():
        medians = {name: statistics.median(values) for name, values in by_name.items()}
        values = [f"{medians[name]:.1f}" for name in (*names, "memory")]
        at_once = f"{medians['requests at once']:.0f} ({pool_tokens // MAX_MODEL_LEN})"
        lines.append([distribution, *values, at_once])
    return markdown_table(["waste, %", *names, *last], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--lengths", nargs="+", choices=DISTRIBUTIONS, default=DISTRIBUTIONS)
    parser.add_argument(
        "--block-sizes", type=positive_int, nargs="+", default=[16, 64], metavar="N"
    )
    parser.add_argument(
        "--pool-tokens", type=whole_number(MAX_MODEL_LEN, 2**24), default=40_000, metavar="N"
    )
    parser.add_argument("--seeds", type=seed_number, nargs="+", default=[0, 1, 2], metavar="N")
    parser.add_argument("--out", type=output_file, default=str(RESULTS_FOLDER / "memory.jsonl"))
    arguments = parser.parse_args(argv)
    for name in ("lengths", "block_sizes", "seeds"):
        values = getattr(arguments, name)
        if len(set(values)) < len(values):
            parser.error(f"--{name.replace('_', '-')} has a value twice; give each value once")
    figures = {
        name: measure_distribution(
            name,
            block_sizes=arguments.block_sizes,
            pool_tokens=arguments.pool_tokens,
            seeds=arguments.seeds,
        )
        for name in arguments.lengths
    }
    append_rows(result_rows(figures, arguments), arguments.out)
    print(table(figures, block_sizes=arguments.block_sizes, pool_tokens=arguments.pool_tokens))
    return 0


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
