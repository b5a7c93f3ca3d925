"""The units of `python -m benchmarks.gpu`."""

import functools
import importlib

from benchmarks.gpu.subject import FULL, MODEL_CONFIGS, REHEARSAL, Subject
from benchmarks.ops import gpu as ops
from benchmarks.units.unit import Measured, Unit

PAXKV, TRANSFORMERS = "paxkv", "transformers"
SUBJECTS = {
    PAXKV: ("benchmarks.gpu.paxkv_model", "PaxkvModel"),
    TRANSFORMERS: ("benchmarks.gpu.transformers_model", "TransformersModel"),
}
DEMO_MODEL = "demo model"
# A unit of the demo model compiles a few small programs.
DEMO_TIME_LIMIT_S = 180.0
# The first unit of a process draws the weights and compiles.
MODEL_TIME_LIMIT_S = 240.0


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    """All units, the most important first."""
    return [
        *ops.machine_units(is_rehearsal=is_rehearsal),
        *ops.first_checks(is_rehearsal=is_rehearsal),
        *demo_units(is_rehearsal=is_rehearsal),
        *ops.other_checks(is_rehearsal=is_rehearsal),
        *ops.timings(is_rehearsal=is_rehearsal),
        *model_units(PAXKV, is_rehearsal=is_rehearsal),
        *model_units(TRANSFORMERS, is_rehearsal=is_rehearsal),
        *ops.xla_checks(is_rehearsal=is_rehearsal),
    ]


def process_key(unit: Unit) -> object:
    """Units with the same value share a process, so that each model is loaded once."""
    if unit.op == DEMO_MODEL:
        return unit.key
    return (unit.op, unit.body) if unit.op in MODEL_CONFIGS else ops.process_key(unit)


def demo_units(*, is_rehearsal: bool) -> list[Unit]:
    """Units that run the demo model: with Mosaic bodies, the engine's choice, XLA, and float32."""
    # An engine with interpreted kernels hangs: a step and its callbacks wait for the same threads.
    kernel_body = "xla" if is_rehearsal else ops.kernel_body(is_rehearsal=False)
    # (case, body, dtype, whether heads are padded for the Mosaic bodies)
    engines = (
        ("greedy tokens, bfloat16, padded heads", kernel_body, "bfloat16", True),
        ("greedy tokens, bfloat16", "default", "bfloat16", False),
        ("greedy tokens, bfloat16", "xla", "bfloat16", False),
        ("greedy tokens, float32", "xla", "float32", False),
    )
    return [
        Unit(
            kind="check",
            op=DEMO_MODEL,
            case=case,
            body=body,
            measure=functools.partial(_check_demo, body, dtype, has_padded_heads, is_rehearsal),
            time_limit_s=DEMO_TIME_LIMIT_S,
        )
        for case, body, dtype, has_padded_heads in engines
    ]


def model_units(engine: str, *, is_rehearsal: bool) -> list[Unit]:
    """All measurements of both models with one engine."""
    sizes = REHEARSAL if is_rehearsal else FULL
    # Case -> method of `Subject` and its arguments.
    cases: dict[str, tuple[str, tuple[int, ...]]] = {
        "throughput": ("throughput", ()),
        **{f"decode, {num} requests": ("decode", (num,)) for num in sizes.decode_batches},
        **{f"first token, prompt {n}": ("first_token", (n,)) for n in sizes.first_token_prompts},
    }
    return [
        Unit(
            kind="time",
            op=model,
            case=case,
            body=engine,
            measure=functools.partial(_measure, model, engine, is_rehearsal, method, arguments),
            time_limit_s=MODEL_TIME_LIMIT_S,
        )
        for model in MODEL_CONFIGS
        for case, (method, arguments) in cases.items()
    ]


def _check_demo(
    body: str, dtype: str, has_padded_heads: bool, is_rehearsal: bool, _: int
) -> Measured:
    # Imported here, so that the units of the ops also run without the engine's packages.
    module = importlib.import_module("benchmarks.gpu.demo_model")
    return module.check_answers(body, dtype, has_padded_heads, is_rehearsal)


def _measure(
    model: str,
    engine: str,
    is_rehearsal: bool,
    method: str,
    arguments: tuple[int, ...],
    seed: int,
) -> Measured:
    return getattr(_load_subject(model, engine, is_rehearsal), method)(*arguments, seed)


@functools.cache
def _load_subject(model: str, engine: str, is_rehearsal: bool) -> Subject:
    """Loads the engine and its model once per process, so that all its units share programs."""
    # Imported here, so that a machine without torch or transformers can measure paxkv.
    module, name = SUBJECTS[engine]
    return getattr(importlib.import_module(module), name)(model, is_rehearsal)
