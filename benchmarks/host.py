"""CPU time of the host per step, without a device.

    python -m benchmarks.host

measures steps in which all requests decode: the scheduler alone (`decode_step_us`: `schedule` and
`update_from_output`), and the scheduler with the runner's host half (`host_step_us`: it also
updates the rows, builds the step's buffer and records the tokens). It also measures the admission
of a prompt whose blocks are all cached. The scheduler has one full-attention group, block size 16
and prefix caching. Tokens are not sampled; making them up is not timed. Requests are spread over
all positions of a block, so one in 16 of them needs a new block in each step.

With `--slots 3x67`, each request also has a slot of states of 3 parts with 67 blocks each, as in
Qwen3-Next-80B. One in 16 requests then saves its state in each step.
"""

import argparse
import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from benchmarks.command_line import output_file, positive_int, run_benchmark, whole_number
from benchmarks.host_batch import HostBatch
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from paxkv.config.cache_config import CacheConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.scheduler_config import SchedulerConfig
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from paxkv.contracts.scheduler_output import ModelRunnerOutput, SchedulerOutput
from paxkv.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_BLOCKS = 60_001
MAX_MODEL_LEN = 16_384
VOCAB_SIZE = 32_000
NUM_ADMITTED_TOKENS = 4096
# Tokens of each request before the measured steps: its prompt, and warm-up steps.
NUM_OTHER_TOKENS = 192


# Parts of a slot of states, and blocks of each part; None without states.
Slots = tuple[int, int] | None


def parse_slots(text: str) -> Slots:
    """Parses `3x67`, or `none`."""
    if text == "none":
        return None
    num_parts, _, blocks_per_state = text.partition("x")
    if not (num_parts.isdigit() and blocks_per_state.isdigit()):
        raise argparse.ArgumentTypeError(f"must be none, or parts x blocks as in 3x67: {text!r}")
    return int(num_parts), int(blocks_per_state)


def num_pool_blocks(max_num_seqs: int, slots: Slots) -> int:
    """Blocks for the tokens of this benchmark, and for four slots of each request."""
    num_slot_blocks = 0 if slots is None else slots[0] * slots[1]
    return NUM_BLOCKS + 4 * max_num_seqs * num_slot_blocks


def make_scheduler(max_num_seqs: int, slots: Slots = None) -> Scheduler:
    """A scheduler with blocks for every request of this benchmark."""
    attention = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    specs: list[KVCacheSpec] = [attention]
    if slots is not None:
        num_parts, blocks_per_state = slots
        specs.append(
            MambaSpec(
                block_size=BLOCK_SIZE,
                page_bytes=attention.page_size_bytes,
                state_bytes=blocks_per_state * attention.page_size_bytes,
                blocks_per_state=blocks_per_state,
                num_parts=num_parts,
            )
        )
    return Scheduler(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max(8192, max_num_seqs)
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        kv_cache_config=KVCacheConfig(
            num_blocks=num_pool_blocks(max_num_seqs, slots),
            kv_cache_groups=tuple(
                KVCacheGroupSpec(layer_names=(f"layer{i}",), kv_cache_spec=spec)
                for i, spec in enumerate(specs)
            ),
        ),
        max_model_len=MAX_MODEL_LEN,
    )


def make_request(request_id: str, num_prompt_tokens: int, rng: random.Random) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=[rng.randrange(VOCAB_SIZE) for _ in range(num_prompt_tokens)],
        sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN),
        eos_token_ids=(VOCAB_SIZE,),
    )


def answer(output: SchedulerOutput, scheduler: Scheduler) -> ModelRunnerOutput:
    """A token for each request whose tokens are all computed."""
    req_ids = list(output.num_scheduled_tokens)
    requests = [scheduler.requests[req_id] for req_id in req_ids]
    return ModelRunnerOutput(
        req_ids=req_ids,
        sampled_token_ids=[
            [r.num_tokens % VOCAB_SIZE] if r.num_computed_tokens >= r.num_tokens else []
            for r in requests
        ],
        logprobs=[None] * len(req_ids),
    )


def run_step(scheduler: Scheduler) -> int:
    """CPU nanoseconds of `schedule` and `update_from_output`."""
    start = time.thread_time_ns()
    output = scheduler.schedule()
    scheduled = time.thread_time_ns()
    runner_output = answer(output, scheduler)
    answered = time.thread_time_ns()
    scheduler.update_from_output(output, runner_output)
    return time.thread_time_ns() - answered + scheduled - start


def run_host_step(scheduler: Scheduler, batch: HostBatch) -> int:
    """CPU nanoseconds of the whole host: the scheduler, and the runner without its device."""
    start = time.thread_time_ns()
    output = scheduler.schedule()
    scheduler.update_from_output(output, batch.finish(batch.start(output)))
    return time.thread_time_ns() - start


def make_decoding_scheduler(
    num_requests: int, run_step: Callable[[Scheduler], int] = run_step, slots: Slots = None
) -> Scheduler:
    """A scheduler whose requests all decode, spread over all positions of a block."""
    scheduler = make_scheduler(num_requests, slots)
    rng = random.Random(0)
    for index in range(num_requests):
        scheduler.add_request(make_request(str(index), 64 + index % BLOCK_SIZE, rng))
    while any(request.num_output_tokens == 0 for request in scheduler.requests.values()):
        run_step(scheduler)
    return scheduler


def measure_decode(
    num_requests: int, num_steps: int, *, with_batch: bool = False, slots: Slots = None
) -> list[float]:
    """Microseconds of each of `num_steps` steps in which every request decodes a token."""
    if with_batch:
        batch = HostBatch(
            max_num_seqs=num_requests,
            max_num_batched_tokens=max(8192, num_requests),
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK_SIZE,
            num_blocks=num_pool_blocks(num_requests, slots),
            vocab_size=VOCAB_SIZE,
            slots=slots,
        )
        step = functools.partial(run_host_step, batch=batch)
    else:
        step = run_step
    scheduler = make_decoding_scheduler(num_requests, step, slots)
    for _ in range(2 * BLOCK_SIZE):
        step(scheduler)
    times = [step(scheduler) / 1e3 for _ in range(num_steps)]
    assert len(scheduler.running) == num_requests
    return times


def measure_admission(num_repetitions: int) -> tuple[list[float], list[float]]:
    """Microseconds of admitting a prompt with cached blocks, and of `add_request` before it.

    `add_request` hashes the prompt; `schedule` finds the cached blocks and allocates.
    """
    scheduler = make_scheduler(max_num_seqs=4)
    admissions: list[float] = []
    additions: list[float] = []
    request = make_request("r", NUM_ADMITTED_TOKENS, random.Random(0))
    for repetition in range(num_repetitions + 1):
        start = time.thread_time_ns()
        scheduler.add_request(request)
        added = time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        scheduler.update_from_output(output, answer(output, scheduler))
        scheduler.finish_requests(["r"])
        scheduler.schedule()
        # Hits are whole blocks, and at least one token must be computed: here the whole last block.
        num_computed_tokens = output.scheduled_new_reqs[0].num_computed_tokens
        assert num_computed_tokens == (NUM_ADMITTED_TOKENS - BLOCK_SIZE if repetition else 0)
        if repetition:
            additions.append((added - start) / 1e3)
            admissions.append((scheduled - added) / 1e3)
    return admissions, additions


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num-running", type=positive_int, nargs="+", default=[1, 64, 256, 1024], metavar="N"
    )
    parser.add_argument(
        "--num-steps",
        type=whole_number(2, MAX_MODEL_LEN - NUM_OTHER_TOKENS),
        default=400,
        metavar="N",
        help="measured steps per case",
    )
    parser.add_argument(
        "--slots",
        type=parse_slots,
        nargs="+",
        default=[None],
        metavar="PARTSxBLOCKS",
        help="slots of states; none: without states",
    )
    parser.add_argument("--num-admissions", type=whole_number(2), default=200, metavar="N")
    out = str(RESULTS_FOLDER / "scheduler_step.jsonl")
    parser.add_argument("--out", type=output_file, default=out)
    arguments = parser.parse_args(argv)
    num_tokens = max(arguments.num_running) * (arguments.num_steps + NUM_OTHER_TOKENS)
    if num_tokens > (NUM_BLOCKS - 1) * BLOCK_SIZE:
        parser.error(
            f"the requests need {num_tokens} slots; the pool has {(NUM_BLOCKS - 1) * BLOCK_SIZE}. "
            "Lower --num-running or --num-steps."
        )
    figures = {
        (_case(num_running, slots), metric): measure_decode(
            num_running, arguments.num_steps, with_batch=with_batch, slots=slots
        )
        for slots, num_running in itertools.product(arguments.slots, arguments.num_running)
        for metric, with_batch in (("decode_step_us", False), ("host_step_us", True))
    }
    admissions_us, additions_us = measure_admission(arguments.num_admissions)
    case = f"num_tokens={NUM_ADMITTED_TOKENS}"
    figures |= {(case, "admission_us"): admissions_us, (case, "add_request_us"): additions_us}
    rows = [
        ResultRow(
            benchmark="benchmarks.host",
            case=case,
            metric=metric,
            values=values,
            device=processor_name(),
        )
        for (case, metric), values in figures.items()
    ]
    append_rows(rows, arguments.out)
    print(markdown_table(["CPU microseconds", "median", "p10", "p90"], list(map(_line, rows))))
    return 0


def _case(num_running: int, slots: Slots) -> str:
    case = f"num_running={num_running}"
    return case if slots is None else f"{case} slots={slots[0]}x{slots[1]}"


def _line(row: ResultRow) -> list[str]:
    deciles = statistics.quantiles(row.values, n=10, method="inclusive")
    figures = (row.median, deciles[0], deciles[-1])
    return [f"{row.metric} {row.case}", *(f"{value:.1f}" for value in figures)]


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
