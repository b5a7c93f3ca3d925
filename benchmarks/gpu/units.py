"""What there is to measure: units, and the groups of them that share a process and a model."""

from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.sizes import LLAMA_3_1_8B, QWEN3_0_6B, sizes_of
from benchmarks.ops.gpu_units import Unit

PAXKV, PAXKV_XLA, TRANSFORMERS = "paxkv", "paxkv, --kernels xla", "transformers"
# Loading a model, and compiling what the first measurement needs.
_LOAD_SILENCE_S = 150.0
_COMPILE_SILENCE_S = 240.0
_SILENCE_S = 120.0
# Where one model alone is asked for, its processes have so many times their share of the time.
_ALONE_SHARE = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Units of one process.

    Args:
        limit_s: Its process is ended after so long, and what it has not done is skipped.
    """

    units: tuple[Unit, ...]
    limit_s: float


def all_groups(*, is_rehearsal: bool, only: str | None = None) -> list[Group]:
    """Every group, in the order of their worth: what comes late may find no time left.

    Args:
        only: A model; all others are left out.
    """
    machine = Unit(
        kind="machine", op="machine", case="copy", body="copy", measure="copy", silence_limit_s=60
    )
    groups = [Group(units=(machine,), limit_s=60)]
    for model, body, limit_s in (
        (LLAMA_3_1_8B, PAXKV, 220),
        (LLAMA_3_1_8B, TRANSFORMERS, 95),
        (QWEN3_0_6B, PAXKV, 150),
        (QWEN3_0_6B, TRANSFORMERS, 60),
        (QWEN3_0_6B, PAXKV_XLA, 70),
        (LLAMA_3_1_8B, PAXKV_XLA, 90),
    ):
        if only in (None, model):
            units = _units(model, body, is_rehearsal=is_rehearsal)
            share = 1.0 if only is None else _ALONE_SHARE
            groups.append(Group(units=units, limit_s=share * limit_s))
    return groups


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    return [unit for group in all_groups(is_rehearsal=is_rehearsal) for unit in group.units]


def subject_of(unit: Unit) -> tuple[str, dict[str, Any]]:
    """ "module:class" of what a unit measures, and the class's arguments but `is_rehearsal`."""
    if unit.kind == "machine":
        return "benchmarks.gpu.machine_subject:MachineSubject", {}
    if unit.body == TRANSFORMERS:
        return "benchmarks.gpu.torch_subject:TorchSubject", {"model": unit.op}
    kernels = "xla" if unit.body == PAXKV_XLA else "auto"
    return "benchmarks.gpu.paxkv_subject:PaxkvSubject", {"model": unit.op, "kernels": kernels}


def decode_case(num_reqs: int) -> str:
    return f"decode, {num_reqs} requests"


def _units(model: str, body: str, *, is_rehearsal: bool) -> tuple[Unit, ...]:
    sizes = sizes_of(is_rehearsal=is_rehearsal)
    first_batch = sizes.decode_batches[0]

    def unit(case: str, measure: str, silence_s: float = _SILENCE_S, **options: Any) -> Unit:
        return Unit(
            kind="time",
            op=model,
            case=case,
            body=body,
            measure=measure,
            options=options,
            silence_limit_s=silence_s,
        )

    def decode(num_reqs: int) -> Unit:
        return unit(decode_case(num_reqs), "decode", _COMPILE_SILENCE_S, num_reqs=num_reqs)

    load = unit("load", "load", _LOAD_SILENCE_S)
    first_tokens = [
        unit(f"first token, prompt {n}", "first_token", _COMPILE_SILENCE_S, prompt_len=n)
        for n in sizes.ttft_prompts
    ]
    if body == PAXKV_XLA:
        return (load, decode(first_batch), first_tokens[-1])
    if body == TRANSFORMERS:
        return (
            load,
            unit("throughput, continuous batching", "continuous_batching"),
            decode(first_batch),
            *first_tokens,
            *map(decode, sizes.decode_batches[1:]),
            unit(
                f"throughput, static batch of {sizes.max_num_seqs}",
                "static_batches",
                batch_size=sizes.max_num_seqs,
            ),
        )
    return (
        load,
        decode(first_batch),
        first_tokens[-1],
        unit("compile for throughput", "compile_throughput", _COMPILE_SILENCE_S),
        unit("throughput, engine", "engine_throughput", _COMPILE_SILENCE_S),
        unit("throughput, steps alone", "throughput"),
        *map(decode, sizes.decode_batches[1:]),
        *first_tokens[:-1],
        unit(
            f"engine decode, {first_batch} requests",
            "engine_decode",
            _COMPILE_SILENCE_S,
            num_reqs=first_batch,
        ),
        unit("prefix", "engine_prefix", _COMPILE_SILENCE_S),
    )
