"""The list of all units, in the order in which they are worth doing."""

import dataclasses
import importlib

import jax

from benchmarks.command_line import BenchmarkError
from benchmarks.ops import (
    gpu_attention_checks,
    gpu_attention_speed,
    gpu_block_ops,
    gpu_machine,
    gpu_mla,
    gpu_peers_jax,
    gpu_scatter,
    gpu_small_ops,
)
from benchmarks.ops.gpu_peers_torch_units import units as torch_units
from benchmarks.ops.gpu_units import Unit
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU

# Timings that the quick run keeps, by the words that their case begins with.
_QUICK_TIMINGS = (
    "decode 64x8,192, block 16",
    "ragged prompt 8,192",
    "8,192 tokens",
    "64x8,192, 16",
)
_QUICK_EVERY = 6  # and of the checks every sixth

_BODY_ORDER = ("mosaic_gpu", "default", "xla", "reference", "mosaic_gpu_interpret")


def all_units(
    *,
    is_rehearsal: bool,
    is_quick: bool = False,
    only: str | None = None,
    body: str | None = None,
    is_tuning: bool = False,
) -> list[Unit]:
    """Machine, then checks, then timings: of the Mosaic bodies, of XLA's, of the peers.

    Args:
        is_rehearsal: Small sizes, and the bodies that a CPU can run.
        only: An op; the others are left out, and what the machine can do stays.
        body: What the names of bodies begin with; likewise.
        is_tuning: Other block configurations too, last.

    Raises:
        BenchmarkError: No op or body has this name, or this JAX cannot run what would be tuned.
    """
    modules = (
        gpu_attention_checks.check_units,
        gpu_attention_speed.cascade_checks,
        gpu_attention_speed.timing_units,
        gpu_mla.units,
        gpu_scatter.units,
        gpu_small_ops.units,
        gpu_block_ops.units,
        gpu_peers_jax.units,
        torch_units,
    )
    machine = gpu_machine.units(is_rehearsal=is_rehearsal)
    listed = [unit for units in modules for unit in units(is_rehearsal=is_rehearsal)]
    if only is not None:
        ops = sorted({unit.op for unit in listed})
        if only not in ops:
            raise BenchmarkError(f"no such op: got {only!r}, wanted one of {ops}")
        listed = [unit for unit in listed if unit.op == only]
    checks = sorted((u for u in listed if u.kind == "check"), key=_body_rank)
    timings = sorted((u for u in listed if u.kind == "time"), key=_body_rank)
    if is_quick:
        checks = checks[::_QUICK_EVERY]
        timings = [u for u in timings if u.case.startswith(_QUICK_TIMINGS)]
    units = [*machine, *checks, *timings]
    if is_tuning:
        units += _tuning_units(is_rehearsal)
    if body is not None:
        bodies = sorted({unit.body for unit in units if unit.kind != "machine"})
        if not any(name.startswith(body) for name in bodies):
            raise BenchmarkError(f"no such body: got {body!r}, wanted one of {bodies}")
        units = [u for u in units if u.kind == "machine" or u.body.startswith(body)]
    if is_rehearsal:
        units = [dataclasses.replace(unit, wanted=None) for unit in units]
    repeated = {unit.key for unit in units if [u.key for u in units].count(unit.key) > 1}
    if repeated:
        raise ValueError(
            f"units of the same name, whose results could not be told apart: {repeated}"
        )
    return units


def _tuning_units(is_rehearsal: bool) -> list[Unit]:
    if jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU:
        wanted = ".".join(map(str, MIN_JAX_FOR_MOSAIC_GPU))
        raise BenchmarkError(f"--tune: got JAX {jax.__version__}, wanted {wanted} or newer.")
    # It imports the kernels themselves, which older JAX cannot.
    tuning = importlib.import_module("benchmarks.ops.gpu_tune")
    return tuning.units(is_rehearsal=is_rehearsal)


def _body_rank(unit: Unit) -> int:
    return _BODY_ORDER.index(unit.body) if unit.body in _BODY_ORDER else len(_BODY_ORDER)
