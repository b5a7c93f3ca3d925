"""Runs the groups one after the other, each in a process of its own, and gathers what they say."""

import contextlib
import functools
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import Findings, report, rows_of
from benchmarks.gpu.units import TRANSFORMERS, Group, all_groups
from benchmarks.ops.gpu_processes import Result, UnitRunner
from benchmarks.result_rows import append_rows

# Of the time limit, for ending processes and the report.
_REPORT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuOptions:
    """What the command line asks for.

    Args:
        out: File of JSON lines; the report goes beside it, with the suffix `.md`.
        only: A model; all others are left out.
        time_limit_s: Ends by then, and says what was left out.
        commit: Hash to write down where the code is no git checkout.
        folder: Where events and logs of the processes go; None is a temporary one.
    """

    out: Path
    only: str | None = None
    time_limit_s: float = 530.0
    is_rehearsal: bool = False
    seed: int = 0
    commit: str | None = None
    folder: Path | None = None


@dataclass(slots=True)
class _Gathered:
    """What has come in so far; rows are written as they come."""

    options: GpuOptions
    started: float
    results: list[Result] = field(default_factory=list)
    device: dict[str, Any] = field(default_factory=dict)

    def findings(self) -> Findings:
        return Findings(
            results=tuple(self.results),
            device=self.device.get("device", "unknown"),
            jax_version=self.device.get("jax", "unknown"),
            is_rehearsal=self.options.is_rehearsal,
        )

    def take(self, result: Result) -> None:
        self.results.append(result)
        rows = rows_of(result, self.findings(), self.options.commit)
        if rows:
            append_rows(rows, self.options.out)
        took_s = result.fields.get("took_s", 0.0)
        passed_s = time.monotonic() - self.started
        text = f"{passed_s:6.1f} s  {result.outcome:8} {result.unit.key}  {took_s:.1f} s"
        print(text, flush=True)

    def take_device(self, device: dict[str, Any]) -> None:
        self.device = device


def run_gpu(options: GpuOptions) -> int:
    """Runs everything there is time for.

    Returns:
        The exit code: 0 if nothing of ours failed or died; 1 if something did; 2 without a GPU. A
        figure that is missed is no failure, and neither is what there was no time for.
    """
    gathered = _Gathered(options, time.monotonic())
    folder = options.folder or Path(tempfile.mkdtemp(prefix="paxkv_gpu_"))
    folder.mkdir(parents=True, exist_ok=True)
    groups = all_groups(is_rehearsal=options.is_rehearsal, only=options.only)
    num_units = sum(len(group.units) for group in groups)
    print(f"{num_units} units, seed {options.seed}, logs in {folder}", flush=True)
    runner = UnitRunner(
        folder=folder,
        run_seed=options.seed,
        worker_options=["--rehearse"] * options.is_rehearsal,
        worker_module="benchmarks.gpu.worker",
        on_result=gathered.take,
        on_device=gathered.take_device,
    )
    with _stopped_by_signals(runner.stop):
        has_device = _run_groups(runner, groups, gathered)
    if not has_device:
        return 2
    text = report(gathered.findings(), seconds=time.monotonic() - gathered.started)
    options.out.with_suffix(".md").write_text(text + "\n")
    print(text, flush=True)
    return int(any(map(_is_bad, gathered.results)))


def _run_groups(runner: UnitRunner, groups: list[Group], gathered: _Gathered) -> bool:
    """Whether there was a device to run them on."""
    options = gathered.options
    deadline = gathered.started + options.time_limit_s - _REPORT_S
    for group in groups:
        group_deadline = min(deadline, time.monotonic() + group.limit_s)
        runner.run_groups([group.units], deadline=group_deadline, num_at_once=1)
        platform = gathered.device.get("platform")
        if platform != "gpu" and not options.is_rehearsal:
            print(
                f"no GPU: got the platform {platform!r} from JAX, wanted 'gpu'. Install "
                "jax[cuda13], or pass --rehearse to try the program in small on a CPU."
            )
            return False
    return True


@contextlib.contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Whoever ends the run early (`timeout`, Ctrl-C) gets the report of what was done by then.

    Without it, the processes, each the leader of a session of its own, would go on alone.
    """

    def handle(handler_stop: Callable[[], None], *_: object) -> None:
        handler_stop()

    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, functools.partial(handle, stop)) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)


def _is_bad(result: Result) -> bool:
    """Whether something of ours did not do what it should; what a peer does is its own affair."""
    is_ours = result.unit.body != TRANSFORMERS
    return is_ours and result.outcome in ("failed", "died")
