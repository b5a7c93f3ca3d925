"""From results to rows of a file, and to the tables that are printed at the end."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.engine.measure import spread
from benchmarks.gpu.sizes import LLAMA_3_1_8B
from benchmarks.gpu.units import PAXKV, TRANSFORMERS, decode_case
from benchmarks.ops.gpu_processes import Result
from benchmarks.ops.gpu_report import OpRow
from benchmarks.tables import markdown_table

BENCHMARK = "benchmarks.gpu"
# Wanted, not measured: of the memory roofline in decode; over transformers' continuous batching.
WANTED_ROOFLINE_PERCENT = 70.0
WANTED_ROOFLINE_CASE = (LLAMA_3_1_8B, decode_case(64))
WANTED_TIMES_CONTINUOUS = 2.0
_REASON_LENGTH = 300
# Metric -> digits behind the point.
_DIGITS = {"tokens_per_s": 0, "ttft_ms": 1, "ttft_p50_ms": 0}
_OURS_OF_ALL_LENGTHS = ("throughput, engine", "throughput, steps alone")
_CONTINUOUS = "throughput, continuous batching"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """All results so far, and the device.

    Args:
        is_rehearsal: Of tiny models, which nothing is wanted of.
    """

    results: tuple[Result, ...]
    device: str
    jax_version: str
    is_rehearsal: bool = False

    @property
    def done(self) -> list[Result]:
        return [result for result in self.results if result.outcome == "done"]

    @property
    def copy_bytes_per_s(self) -> float | None:
        """Measured in the same run; None if it was not."""
        for result in self.done:
            if result.unit.kind == "machine":
                return 1e9 * statistics.median(result.fields["figures"]["copy_gb_per_s"])
        return None

    def find(self, model: str, case: str, body: str) -> Result | None:
        """What was done of it."""
        key = (model, case, body)
        matching = (r for r in self.done if (r.unit.op, r.unit.case, r.unit.body) == key)
        return next(matching, None)


def roofline_percent(result: Result, findings: Findings) -> list[float]:
    """Share of the copy bandwidth at which a decode step's weights, keys and values were read.

    A peer reads what paxkv reads: contexts are nearly the same. Empty where the bandwidth or the
    bytes are unknown.
    """
    bandwidth = findings.copy_bytes_per_s
    reads = result.fields.get("reads")
    if reads is None or bandwidth is None:
        return []
    num_bytes = reads["weight_bytes"] + reads["kv_bytes"]
    return [
        100 * num_bytes / (1e-3 * step_ms) / bandwidth
        for step_ms in result.fields["figures"]["step_ms"]
    ]


def rows_of(result: Result, findings: Findings, commit: str | None) -> list[OpRow]:
    """A line of the file for each figure of a result; none where nothing was measured."""
    if result.outcome != "done":
        return []
    unit = result.unit
    details: dict[str, Any] = {
        "model": unit.op,
        "engine": unit.body,
        "seed": result.fields.get("seed"),
    }
    for name in ("notes", "reads"):
        if result.fields.get(name):
            details[name] = result.fields[name]
    figures = dict(result.fields["figures"])
    share = roofline_percent(result, findings)
    if share:
        figures["roofline_percent"] = share
        details["measured_copy_gb_per_s"] = findings.copy_bytes_per_s / 1e9
    return [
        OpRow(
            benchmark=BENCHMARK,
            case=f"model={unit.op} engine={unit.body} what={unit.case}",
            metric=metric,
            values=values,
            device=findings.device,
            details=details,
            commit=commit,
        )
        for metric, values in figures.items()
    ]


def report(findings: Findings, *, seconds: float) -> str:
    """Markdown: what was measured, and what was not."""
    bandwidth = findings.copy_bytes_per_s
    copy = "not measured" if bandwidth is None else f"{bandwidth / 1e9:,.0f} GB/s"
    models = list(dict.fromkeys(r.unit.op for r in findings.results if r.unit.kind != "machine"))
    rehearsal = "Rehearsal with tiny models, no results: " if findings.is_rehearsal else ""
    title = f"{', '.join(models)} on {findings.device}, JAX {findings.jax_version}, {seconds:.0f} s"
    parts = [
        f"# {rehearsal}{title}",
        f"Random weights. Copy bandwidth, bytes read and written: {copy}. Engines draw their "
        "weights each for itself, so their tokens are not the same, and are not compared.",
        *_section("Decode", _decode_table(findings)),
        *_section("Decode by the engine", _engine_decode_table(findings)),
        *_section("First token of one prompt", _first_token_table(findings)),
        *_section("Output tokens/s, requests of all lengths", _throughput_table(findings)),
        *_section("Prompts with one beginning", _prefix_table(findings)),
        *_section("Loading and compiling", _start_table(findings)),
        *_section("Notes", _note_lines(findings)),
        *_section("What was not measured", _failure_lines(findings)),
        *_section("Wanted", [] if findings.is_rehearsal else _wanted_lines(findings)),
    ]
    return "\n\n".join(parts)


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(lines)] if lines else []


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [markdown_table(head, lines)] if lines else []


def _cell(result: Result, metric: str, digits: int = 2) -> str:
    values = result.fields["figures"].get(metric)
    return spread(values, digits) if values else ""


def _decode_table(findings: Findings) -> list[str]:
    head = (
        "model, requests, engine",
        "context",
        "step ms",
        "tokens/s",
        "% of roofline",
        "step alone ms",
        "device alone ms",
        "host ms a step",
        "host ms a step alone",
        "device idle %",
        "idle % in steps alone",
    )
    lines = []
    decodes = [result for result in findings.done if result.unit.case.startswith("decode")]
    for result in sorted(decodes, key=lambda r: (r.unit.op, r.unit.options["num_reqs"])):
        share = roofline_percent(result, findings)
        reads = result.fields.get("reads")
        num_reqs = result.unit.options["num_reqs"]
        lines.append(
            (
                f"{result.unit.op}, {num_reqs}, {result.unit.body}",
                f"{reads['context_tokens']:.0f}" if reads else "",
                _cell(result, "step_ms"),
                _cell(result, "tokens_per_s", 0),
                spread(share, 1) if share else "",
                _cell(result, "single_step_ms"),
                _cell(result, "device_step_ms"),
                _cell(result, "host_ms_per_step"),
                _cell(result, "host_ms_per_single_step"),
                _cell(result, "device_idle_percent", 1),
                _cell(result, "device_idle_single_percent", 1),
            )
        )
    if not lines:
        return []
    return [
        *_table(head, lines),
        "",
        "A step is one of a burst, started one burst ahead; a step alone brings its tokens home at "
        "once, and is the time between two tokens. Device alone: bursts queued, so that the device "
        "never waits for the host; idle is what a step takes longer than that. Gaps between "
        "kernels within a program are the device's own. Roofline: bytes of weights, keys and "
        "values that a step must read, over the copy bandwidth, over the step's time.",
    ]


def _engine_decode_table(findings: Findings) -> list[str]:
    lines = []
    for result in findings.done:
        if not result.unit.case.startswith("engine decode"):
            continue
        unit = result.unit
        num_reqs = unit.options["num_reqs"]
        steps = findings.find(unit.op, decode_case(num_reqs), unit.body)
        idle = ""
        if steps is not None:
            device_ms = statistics.median(steps.fields["figures"]["device_step_ms"])
            step_ms = statistics.median(result.fields["figures"]["step_ms"])
            idle = f"{100 * (1 - device_ms / step_ms):.1f}"
        lines.append(
            (
                f"{unit.op}, {num_reqs}",
                _cell(result, "step_ms"),
                _cell(result, "tokens_per_s", 0),
                _cell(result, "host_ms_per_step"),
                idle,
            )
        )
    if not lines:
        return []
    head = ("model, requests", "step ms", "tokens/s", "host ms a step", "device idle %")
    return [
        *_table(head, lines),
        "",
        "Host: what it does besides waiting for tokens. Idle: what a step takes longer than the "
        "device alone above, whose contexts differ by a few tokens.",
    ]


def _first_token_table(findings: Findings) -> list[str]:
    results = [r for r in findings.done if r.unit.case.startswith("first token")]
    results.sort(key=lambda r: (r.unit.op, r.unit.options["prompt_len"]))
    lines = [
        (f"{r.unit.op}, {r.unit.options['prompt_len']}, {r.unit.body}", _cell(r, "ttft_ms", 1))
        for r in results
    ]
    if not lines:
        return []
    return [
        *_table(("model, prompt tokens, engine", "ms"), lines),
        "",
        "From token ids to the first token on the host, on an idle device: no text, no HTTP.",
    ]


def _throughput_table(findings: Findings) -> list[str]:
    lines = []
    for result in findings.done:
        unit = result.unit
        if not unit.case.startswith("throughput"):
            continue
        ratios = [_times(findings, unit.op, ours, result) for ours in _OURS_OF_ALL_LENGTHS]
        if unit.body == PAXKV:
            ratios = ["", ""]
        name = f"{unit.op}, {unit.body}: {unit.case.removeprefix('throughput, ')}"
        lines.append((name, _cell(result, "tokens_per_s", 0), *ratios))
    head = ("model, engine", "tokens/s", "paxkv's engine over it", "paxkv's steps over it")
    if not lines:
        return []
    return [
        *_table(head, lines),
        "",
        "Steps alone: paxkv's compiled steps under a schedule of this benchmark's own, first come, "
        "first served, which needs none of the engine's packages.",
    ]


def _times(findings: Findings, model: str, our_case: str, other: Result | None) -> str:
    ratio = _ratio(findings, model, our_case, other)
    return "" if ratio is None else f"{ratio:.2f}"


def _ratio(findings: Findings, model: str, our_case: str, other: Result | None) -> float | None:
    ours = findings.find(model, our_case, PAXKV)
    if ours is None or other is None:
        return None
    our_rate, other_rate = (
        statistics.median(result.fields["figures"]["tokens_per_s"]) for result in (ours, other)
    )
    return our_rate / other_rate


def _prefix_table(findings: Findings) -> list[str]:
    lines = [
        (
            r.unit.op,
            _cell(r, "cache_on_tokens_per_s", 0),
            _cell(r, "cache_off_tokens_per_s", 0),
            _cell(r, "cache_on_times_off"),
        )
        for r in findings.done
        if r.unit.case == "prefix"
    ]
    return _table(("model", "cache on, tokens/s", "off", "on over off"), lines)


def _start_table(findings: Findings) -> list[str]:
    lines = []
    for result in findings.done:
        figures = result.fields["figures"]
        for metric in ("load_s", "compile_s"):
            if metric in figures:
                name = f"{result.unit.op}, {result.unit.body}: {result.unit.case}"
                lines.append((name, _cell(result, metric, 1)))
    return _table(("model, engine, for", "seconds"), lines)


def _note_lines(findings: Findings) -> list[str]:
    return [
        f"- {result.unit.op}, {result.unit.body}: {_short(note)}"
        for result in findings.done
        for note in result.fields.get("notes", ())
    ]


def _failure_lines(findings: Findings) -> list[str]:
    """What has one reason is one line."""
    cases: dict[tuple[str, ...], list[str]] = {}
    for result in findings.results:
        if result.outcome != "done":
            is_loud = result.outcome in ("failed", "died")
            outcome = result.outcome.upper() if is_loud else result.outcome
            key = (outcome, result.unit.op, result.unit.body, _short(result.reason))
            cases.setdefault(key, []).append(result.unit.case)
    return [
        f"- {outcome}: {model}, {body} ({'; '.join(of_key)}): {reason}"
        for (outcome, model, body, reason), of_key in cases.items()
    ]


def _wanted_lines(findings: Findings) -> list[str]:
    """Wanted figures beside measured ones; none where nothing was measured."""
    lines = []
    model, case = WANTED_ROOFLINE_CASE
    decode = findings.find(model, case, PAXKV)
    share = [] if decode is None else roofline_percent(decode, findings)
    if share:
        lines.append(
            f"- wanted {WANTED_ROOFLINE_PERCENT:.0f} % of the roofline, {model}, {case}: got "
            f"{statistics.median(share):.1f} %, "
            f"{_verdict(statistics.median(share), WANTED_ROOFLINE_PERCENT)}"
        )
    for model in dict.fromkeys(r.unit.op for r in findings.done):
        continuous = findings.find(model, _CONTINUOUS, TRANSFORMERS)
        for our_case in _OURS_OF_ALL_LENGTHS:
            ratio = _ratio(findings, model, our_case, continuous)
            if ratio is not None:
                lines.append(
                    f"- wanted {WANTED_TIMES_CONTINUOUS:g} times transformers' continuous "
                    f"batching, {model}, {our_case.removeprefix('throughput, ')}: got "
                    f"{ratio:.2f}, {_verdict(ratio, WANTED_TIMES_CONTINUOUS)}"
                )
    return lines


def _verdict(got: float, wanted: float) -> str:
    return "met" if got >= wanted else "missed"


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _REASON_LENGTH else f"...{text[-_REASON_LENGTH:]}"
