"""The same requests through continuous and through static batching, drawn slot by slot.

    python -m benchmarks.continuous_vs_static --plot continuous_vs_static.png

A static batch ends when its longest request ends; until then, the slots of the others stand empty
and nobody who waits may use them. Continuous batching fills a slot in the next step. Both run here
on the same engine, one after the other, in turn --num-repetitions times:

    continuous  all requests are handed over at once; the engine runs --num-slots of them at a time
    static      --num-slots requests are handed over, all of them awaited, then the next ones

Requests are the first --num-requests of the workload "skewed" of benchmarks/workloads.py: prompts
of 32 to 128 tokens, a few outputs of 192 to 256 tokens among outputs of 8 to 32, which end at
exactly that length. Prefix caching is off, so that the second run finds nothing of the first.

Times are those of the engine's own trace: a request starts when the scheduler first gives it a
token to compute, its first token and its end are when the step that made them is over. Wall time is
from the first request's arrival to the last one's end. Mean slot occupancy is the time that slots
held a request over --num-slots times the wall time. An answer's time is from the start of the run,
when all requests were there, to its own last token.

A batch that empties also gets faster, the more so the more of a step is work for each request, as
it is on a CPU: so the ratio of the wall times is smaller than that of the occupancies.
"""

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from benchmarks.command_line import (
    image_file,
    output_file,
    positive_int,
    run_benchmark,
    seed_number,
)
from benchmarks.result_rows import RESULTS_FOLDER, ResultRow, append_rows, processor_name
from benchmarks.tables import markdown_table
from benchmarks.workloads import Workload, make_workload
from models.errors import ModelError
from paxkv.build import BuiltEngine, build_engine
from paxkv.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from paxkv.contracts.engine_output import EngineDead, StepOutputs
from paxkv.contracts.engine_request import AddRequest, EngineRequest
from paxkv.errors import EngineDeadError
from paxkv.sampling_params import SamplingParams
from paxkv.scheduler.trace.calls import AddRequestCall, Call, ScheduleCall, UpdateCall
from paxkv.scheduler.trace.trace_file import TraceReader

Mode = Literal["static", "continuous"]
MODES: tuple[Mode, ...] = ("static", "continuous")


@dataclasses.dataclass(slots=True, kw_only=True)
class RequestBar:
    """One request in one run; times are seconds since the run's first arrival.

    Args:
        index: Its place in the workload.
        slot: In `[0, num_slots)`.
        num_tokens: Of its output.
    """

    index: int
    slot: int = -1
    start_s: float = -1.0
    first_token_s: float = -1.0
    end_s: float = -1.0
    num_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchingRun:
    """One run of all requests."""

    mode: Mode
    num_slots: int
    bars: Sequence[RequestBar]

    @property
    def wall_s(self) -> float:
        return max(bar.end_s for bar in self.bars)

    @property
    def occupancy_percent(self) -> float:
        """Mean share of slots that hold a request."""
        held_s = sum(bar.end_s - bar.start_s for bar in self.bars)
        return 100 * held_s / (self.num_slots * self.wall_s)

    @property
    def num_output_tokens(self) -> int:
        return sum(bar.num_tokens for bar in self.bars)

    def figures(self) -> dict[str, float]:
        """Name with unit -> value."""
        return {
            "wall_s": self.wall_s,
            "slot_occupancy_percent": self.occupancy_percent,
            "output_tokens_per_s": self.num_output_tokens / self.wall_s,
            "mean_first_token_s": statistics.fmean(bar.first_token_s for bar in self.bars),
            "mean_answer_s": statistics.fmean(bar.end_s for bar in self.bars),
        }


def run_all(
    config: EngineConfig, num_requests: int, num_repetitions: int, *, seed: int
) -> list[dict[Mode, BatchingRun]]:
    """One run a mode for each repetition, all by one engine.

    Args:
        config: `max_num_seqs` is the number of slots; a trace file is added.
    """
    with tempfile.TemporaryDirectory() as folder:
        trace_file = Path(folder) / "trace"
        scheduler_config = dataclasses.replace(config.scheduler, trace_file=str(trace_file))
        engine = build_engine(
            dataclasses.replace(config, scheduler=scheduler_config), show_progress=True
        )
        num_slots = scheduler_config.max_num_seqs
        try:
            vocab_size = engine.model_info.vocab_size
            workload = make_workload("skewed", vocab_size=vocab_size, seed=seed)
            workload = workload.first(num_requests)
            # What only a first run does, such as touching memory, is in none of those below.
            _run(engine, _engine_requests(engine, workload.first(num_slots, 8), "warm-up"))
            for repetition in range(num_repetitions):
                for mode in MODES:
                    requests = _engine_requests(engine, workload, _run_name(mode, repetition))
                    size = num_slots if mode == "static" else len(requests)
                    for first in range(0, len(requests), size):
                        _run(engine, requests[first : first + size])
        finally:
            # Also ends the trace.
            engine.transport.close()
        bars_of = read_trace(TraceReader.open(trace_file))
    return [
        {mode: make_run(mode, num_slots, bars_of[_run_name(mode, repetition)]) for mode in MODES}
        for repetition in range(num_repetitions)
    ]


def _run_name(mode: Mode, repetition: int) -> str:
    return f"{mode}-{repetition}"


def _engine_requests(engine: BuiltEngine, workload: Workload, run_name: str) -> list[EngineRequest]:
    return [
        engine.input_processor.process(
            request.prompt_token_ids,
            SamplingParams(max_tokens=request.num_output_tokens, temperature=0.0, ignore_eos=True),
            request_id=f"{run_name}/{index}",
        )
        for index, request in enumerate(workload.requests)
    ]


def _run(engine: BuiltEngine, requests: Sequence[EngineRequest]) -> None:
    """Hands requests over and waits until all have ended."""
    for request in requests:
        engine.transport.send(AddRequest(request=request))
    unfinished = {request.request_id for request in requests}
    while unfinished:
        message = engine.transport.receive()
        if isinstance(message, EngineDead):
            raise EngineDeadError(f"the engine has ended: {message.reason}")
        if isinstance(message, StepOutputs):
            unfinished -= {o.request_id for o in message.outputs if o.finish_reason is not None}


def read_trace(reader: TraceReader) -> dict[str, list[RequestBar]]:
    """Bars of each run by its name, slots not chosen yet; request ids are `{run}/{index}`."""
    arrivals_s: dict[str, float] = {}  # of runs
    bars: dict[str, RequestBar] = {}  # of requests
    for line in reader.lines():
        for call in line.calls:
            _add_call(call, arrivals_s, bars)
    runs: dict[str, list[RequestBar]] = {name: [] for name in arrivals_s}
    for req_id, bar in bars.items():
        name = req_id.rpartition("/")[0]
        for field in ("start_s", "first_token_s", "end_s"):
            setattr(bar, field, getattr(bar, field) - arrivals_s[name])
        runs[name].append(bar)
    return runs


def _add_call(call: Call, arrivals_s: dict[str, float], bars: dict[str, RequestBar]) -> None:
    match call:
        case AddRequestCall():
            name, _, index = call.engine_request().request_id.rpartition("/")
            arrivals_s.setdefault(name, call.at_s)
            bars[f"{name}/{index}"] = RequestBar(index=int(index))
        case ScheduleCall(decision=decision) if decision is not None:
            for row in decision.new:
                bars[row.req_id].start_s = call.at_s
        case UpdateCall():
            now_s = call.at_s + call.took_s
            for output in call.outputs:
                bar = bars[output.req_id]
                if bar.num_tokens == 0 and output.new_token_ids:
                    bar.first_token_s = now_s
                bar.num_tokens += len(output.new_token_ids)
                if output.finish_reason is not None:
                    bar.end_s = now_s


def make_run(mode: Mode, num_slots: int, bars: Sequence[RequestBar]) -> BatchingRun:
    """Gives every request the lowest slot that is free when it starts.

    Raises:
        ValueError: More than `num_slots` requests run at once.
    """
    free_from_s = [0.0] * num_slots
    ordered = sorted(bars, key=lambda bar: (bar.start_s, bar.index))
    for bar in ordered:
        # The trace has times to a tenth of a microsecond.
        free = [slot for slot, end_s in enumerate(free_from_s) if end_s <= bar.start_s + 1e-6]
        if not free:
            raise ValueError(f"request {bar.index} starts while all {num_slots} slots are taken.")
        bar.slot = free[0]
        free_from_s[bar.slot] = bar.end_s
    return BatchingRun(mode=mode, num_slots=num_slots, bars=ordered)


def result_rows(
    repetitions: Sequence[dict[Mode, BatchingRun]], case: str, device: str
) -> list[ResultRow]:
    """A row for each figure of each mode, and the ratio of the wall times."""
    values: dict[tuple[str, str], list[float]] = {}
    for runs in repetitions:
        for mode, run in runs.items():
            for name, value in run.figures().items():
                values.setdefault((f"batching={mode} {case}", name), []).append(value)
        ratio = runs["static"].wall_s / runs["continuous"].wall_s
        values.setdefault((case, "wall_time_static_over_continuous"), []).append(ratio)
    return [
        ResultRow(
            benchmark="benchmarks.continuous_vs_static",
            case=row_case,
            metric=metric,
            values=of_repetitions,
            device=device,
        )
        for (row_case, metric), of_repetitions in values.items()
    ]


def table(repetitions: Sequence[dict[Mode, BatchingRun]]) -> str:
    """Medians as Markdown; the last column is the median of the repetitions' ratios."""
    lines = []
    for name in repetitions[0]["static"].figures():
        static, continuous = ([r[mode].figures()[name] for r in repetitions] for mode in MODES)
        ratios = [s / c for s, c in zip(static, continuous, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        medians = (f"{statistics.median(values):.4g}" for values in (static, continuous))
        lines.append([name, *medians, spread])
    return markdown_table(["median", "static", "continuous", "static / continuous"], lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    num_known = len(make_workload("skewed", vocab_size=2).requests)
    # Rows would tell of requests that nobody sent.
    if arguments.num_requests > num_known:
        parser.error(f"--num-requests must be at most {num_known}, got {arguments.num_requests}")
    config = EngineConfig(
        model=ModelConfig(model=arguments.model),
        cache=CacheConfig(enable_prefix_caching=False),
        scheduler=SchedulerConfig(
            max_num_seqs=arguments.num_slots, max_num_batched_tokens=arguments.max_batched_tokens
        ),
    )
    repetitions = run_all(
        config, arguments.num_requests, arguments.num_repetitions, seed=arguments.seed
    )
    print(table(repetitions))
    case = (
        f"model={arguments.model or 'demo'} workload=skewed num_requests={arguments.num_requests} "
        f"num_slots={arguments.num_slots} max_batched_tokens={arguments.max_batched_tokens} "
        f"seed={arguments.seed}"
    )
    append_rows(result_rows(repetitions, case, arguments.device), arguments.out)
    if arguments.plot is not None:
        # Figures need no matplotlib, which only the `bench` extra brings.
        from benchmarks.continuous_vs_static_plot import draw_runs  # noqa: PLC0415

        middle = sorted(repetitions, key=_wall_time_ratio)[len(repetitions) // 2]
        draw_runs([middle[mode] for mode in MODES], arguments.plot)
    return 0


def _wall_time_ratio(runs: dict[Mode, BatchingRun]) -> float:
    return runs["static"].wall_s / runs["continuous"].wall_s


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.continuous_vs_static",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model", help="folder of a checkpoint; the demo model if left out")
    parser.add_argument(
        "--num-requests", type=positive_int, default=32, metavar="N", help="at most 64"
    )
    parser.add_argument("--num-slots", type=positive_int, default=8, metavar="N")
    parser.add_argument(
        "--max-batched-tokens",
        type=positive_int,
        default=256,
        metavar="N",
        help="token budget of a step, prefill and decode together",
    )
    parser.add_argument("--num-repetitions", type=positive_int, default=5, metavar="N")
    parser.add_argument("--seed", type=seed_number, default=0, help="of the workload")
    parser.add_argument("--device", default=processor_name(), help="chip, for the rows")
    parser.add_argument(
        "--out", type=output_file, default=str(RESULTS_FOLDER / "continuous_vs_static.jsonl")
    )
    parser.add_argument(
        "--plot",
        type=image_file,
        metavar="PNG",
        help="draw the repetition with the median ratio; needs matplotlib",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run_benchmark(main, ModelError))
