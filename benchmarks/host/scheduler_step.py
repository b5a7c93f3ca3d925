"""CPU time that the host's decisions take: steps of steady decode, and admission of a known prompt.

Each step is `schedule` and `update_from_output` of a scheduler with one full attention group, block
size 16 and prefix caching; tokens come from nowhere and are not in the time. Requests stand at all
places of a block, so that in every step one in 16 of them needs a new block. Figures of another
engine on this kind of machine, taken elsewhere, are printed beside.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.command_line import output_file, positive_int, run_benchmark, whole_number
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from paxkv.config.engine_config import CacheConfig, SchedulerConfig
from paxkv.config.sampling_params import SamplingParams
from paxkv.contracts.engine_request import EngineRequest
from paxkv.contracts.kv_cache_spec import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from paxkv.contracts.runner_output import ModelRunnerOutput
from paxkv.contracts.scheduler_output import SchedulerOutput
from paxkv.scheduler.scheduler import Scheduler

BLOCK_SIZE = 16
NUM_BLOCKS = 60_001
MAX_MODEL_LEN = 16_384
VOCAB_SIZE = 32_000
NUM_ADMITTED_TOKENS = 4096
# Of each request: its prompt, and steps before those that are measured.
NUM_OTHER_TOKENS = 192
MAX_NUM_STEPS = MAX_MODEL_LEN - NUM_OTHER_TOKENS

# Microseconds of another engine, measured elsewhere on this kind of machine; not taken again here.
ELSEWHERE_STEP_US = {1: 30, 64: 630, 256: 3230, 1024: 15370}
ELSEWHERE_ADMISSION_US = 800


def make_scheduler(max_num_seqs: int) -> Scheduler:
    """A scheduler that never runs out of blocks here."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=8, head_size=128, dtype="bfloat16")
    return Scheduler(
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max(8192, max_num_seqs)
        ),
        cache_config=CacheConfig(block_size=BLOCK_SIZE),
        kv_cache_config=KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_groups=(KVCacheGroupSpec(layer_names=("layer",), kv_cache_spec=spec),),
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
    """A token for each request that is computed to its end."""
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
    """CPU nanoseconds of one step's decision and of taking in its tokens."""
    start = time.thread_time_ns()
    output = scheduler.schedule()
    scheduled = time.thread_time_ns()
    runner_output = answer(output, scheduler)
    answered = time.thread_time_ns()
    scheduler.update_from_output(output, runner_output)
    return time.thread_time_ns() - answered + scheduled - start


def make_decoding_scheduler(num_requests: int) -> Scheduler:
    """A scheduler whose requests all decode, at all places of a block."""
    scheduler = make_scheduler(num_requests)
    rng = random.Random(0)
    for index in range(num_requests):
        scheduler.add_request(make_request(str(index), 64 + index % BLOCK_SIZE, rng))
    while any(request.num_output_tokens == 0 for request in scheduler.requests.values()):
        run_step(scheduler)
    return scheduler


def measure_decode(num_requests: int, num_steps: int) -> list[float]:
    """Microseconds of each of `num_steps` steps in which every request decodes a token."""
    scheduler = make_decoding_scheduler(num_requests)
    for _ in range(2 * BLOCK_SIZE):
        run_step(scheduler)
    times = [run_step(scheduler) / 1e3 for _ in range(num_steps)]
    assert len(scheduler.running) == num_requests
    return times


def measure_admission(num_repetitions: int) -> tuple[list[float], list[float]]:
    """Microseconds of admitting a prompt whose blocks are all known, and of adding it before.

    Adding hashes the prompt; admission is the `schedule` that finds the hits and allocates.
    """
    scheduler = make_scheduler(max_num_seqs=4)
    rng = random.Random(0)
    admissions: list[float] = []
    additions: list[float] = []
    request = make_request("r", NUM_ADMITTED_TOKENS, rng)
    for repetition in range(num_repetitions + 1):
        start = time.thread_time_ns()
        scheduler.add_request(request)
        added = time.thread_time_ns()
        output = scheduler.schedule()
        scheduled = time.thread_time_ns()
        scheduler.update_from_output(output, answer(output, scheduler))
        scheduler.finish_requests(["r"])
        scheduler.schedule()
        # The last block is computed again: a token must be, and hits are whole blocks.
        num_computed_tokens = output.scheduled_new_reqs[0].num_computed_tokens
        assert num_computed_tokens == (NUM_ADMITTED_TOKENS - BLOCK_SIZE if repetition else 0)
        if repetition:
            additions.append((added - start) / 1e3)
            admissions.append((scheduled - added) / 1e3)
    return admissions, additions


def report(name: str, times_us: Sequence[float], elsewhere_us: float | None) -> str:
    deciles = statistics.quantiles(times_us, n=10)
    median = statistics.median(times_us)
    line = f"{name:<34} {median:>9.1f} {deciles[0]:>9.1f} {deciles[-1]:>9.1f}"
    if elsewhere_us is not None:
        line += f" {elsewhere_us:>10} {median / elsewhere_us:>5.2f}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host.scheduler_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num-running", type=positive_int, nargs="+", default=list(ELSEWHERE_STEP_US)
    )
    parser.add_argument(
        "--num-steps",
        type=whole_number(2, MAX_NUM_STEPS),
        default=400,
        help="measured steps a case",
    )
    parser.add_argument("--num-admissions", type=whole_number(2), default=200)
    parser.add_argument(
        "--out", type=output_file, default=str(RESULTS_FOLDER / "scheduler_step.jsonl")
    )
    arguments = parser.parse_args()
    num_tokens = max(arguments.num_running) * (arguments.num_steps + NUM_OTHER_TOKENS)
    if num_tokens > (NUM_BLOCKS - 1) * BLOCK_SIZE:
        parser.error(
            f"{max(arguments.num_running)} requests of {arguments.num_steps} steps need room for "
            f"{num_tokens} tokens, there is room for {(NUM_BLOCKS - 1) * BLOCK_SIZE}; lower "
            "--num-running or --num-steps"
        )
    rows: list[ResultRow] = []

    def add(case: str, metric: str, values: list[float], elsewhere_us: float | None) -> None:
        print(report(f"{metric.removesuffix('_us')} {case}", values, elsewhere_us), flush=True)
        benchmark = "benchmarks.host.scheduler_step"
        rows.append(
            ResultRow(
                benchmark=benchmark,
                case=case,
                metric=metric,
                values=values,
                device=processor_name(),
            )
        )

    print(
        f"{'CPU microseconds':<34} {'median':>9} {'p10':>9} {'p90':>9} {'elsewhere':>10} {'x':>7}"
    )
    for num_running in arguments.num_running:
        times_us = measure_decode(num_running, arguments.num_steps)
        elsewhere_us = ELSEWHERE_STEP_US.get(num_running)
        add(f"num_running={num_running}", "decode_step_us", times_us, elsewhere_us)
    admissions_us, additions_us = measure_admission(arguments.num_admissions)
    case = f"num_tokens={NUM_ADMITTED_TOKENS}"
    add(case, "admission_us", admissions_us, ELSEWHERE_ADMISSION_US)
    add(case, "add_request_us", additions_us, None)
    append_rows(rows, arguments.out)


if __name__ == "__main__":
    sys.exit(run_benchmark(main))
