"""The units of the GPU benchmark: one check or one timing each, small enough to die alone."""

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

# What bodies of ours are called; everything else in a table is a peer.
OUR_BODIES = ("mosaic_gpu", "mosaic_gpu_interpret", "xla", "reference", "default")

# Relative error in the norm that a correct body stays under, by the dtype it computes with.
ERROR_LIMITS = {"bfloat16": 1e-2, "float16": 5e-3, "float32": 1e-5}
# One token's head among many may be wrong without moving the norm of all: each has a limit too.
ROW_LIMIT_FACTOR = 10.0

# About what an H200 does; only used to guess how long a call takes before it is measured.
GUESSED_BYTES_PER_S = 4e12
GUESSED_FLOPS_PER_S = 6e14
SHORT_CALL_S = 200e-6
LOOP_S = 2e-3
DEFAULT_CALLS_PER_STEP = 4


class AbsentError(Exception):
    """What was to be measured is not there: a package, a body for these arguments, a device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How far one result lies from what is right."""

    what: str
    error: float  # relative, in the norm; the number of wrong entries where `limit` is 0
    limit: float

    @property
    def is_right(self) -> bool:
        """NaN is never right: it compares with nothing."""
        return self.error < self.limit or self.error == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a timing should reach. A second value is the one after that."""

    figure: Literal["copy_share", "floor_share", "tflops", "us"]
    values: tuple[float, ...]

    @property
    def is_lower_better(self) -> bool:
        return self.figure == "us"


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What a check runs once and a timing many times.

    Args:
        make: Draws, from a seed, the state (poisoned where a step is to write it) and the inputs.
        step: One step, `(step_idx, state, inputs) -> state`; it runs under jit, and in a loop.
        verify: `(state, inputs, last_step_idx) -> findings`, on the host.
        calls_per_step: How often a step calls the op.
    """

    make: Callable[[int], tuple[Any, Any]]
    step: Callable[[jax.Array, Any, Any], Any]
    verify: Callable[[Any, Any, int], list[Finding]]
    calls_per_step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One check or one timing of one body.

    Args:
        program: Builds what is run; late, so that a broken op costs its own rows only.
        measure: Instead of a program, `"module:function"` of something that times itself and is
            called with `options` and the seed.
        num_steps: Steps in one program, a loop; 1 is none.
        highest_precision: Whether float32 products are full float32 ones.
        silence_limit_s: After so long without a sign of life its process is ended.
    """

    kind: Literal["machine", "check", "time"]
    op: str
    case: str
    body: str
    program: Callable[[], Program] | None = None
    measure: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    num_bytes: int = 0
    num_flops: int = 0
    num_steps: int = 1
    wanted: Wanted | None = None
    highest_precision: bool = False
    silence_limit_s: float = 60.0

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.op}|{self.case}|{self.body}"

    @property
    def family(self) -> str:
        """Units that share a kernel, and so its crashes; decode has kernels of its own."""
        is_decode = self.case.startswith("decode")
        return f"{self.kind} {self.op} {self.body}{' decode' if is_decode else ''}"

    @property
    def is_ours(self) -> bool:
        return self.body.startswith(OUR_BODIES)

    def seed(self, run_seed: int) -> int:
        """A seed of its own, the same again for the same run's seed."""
        return (run_seed + zlib.crc32(self.key.encode())) % 2**31


def loop_shape(
    num_bytes: int,
    num_flops: int,
    *,
    is_rehearsal: bool = False,
    calls_per_step: int = DEFAULT_CALLS_PER_STEP,
) -> tuple[int, int]:
    """Steps a program and calls a step that hide the cost of starting a program.

    A call of half a millisecond is queued by itself. One of 20 microseconds is over before the
    next could be queued, so 4 in a row make a step (whose counting costs a little too), and 25
    steps a program of 2 ms.

    Args:
        calls_per_step: Each is compiled by itself; fewer do for longer calls.
    """
    if is_rehearsal:
        return 2, 2
    guess_s = max(num_bytes / GUESSED_BYTES_PER_S, num_flops / GUESSED_FLOPS_PER_S)
    if guess_s >= SHORT_CALL_S:
        return 1, 1
    num_steps = math.ceil(LOOP_S / max(guess_s, 5e-6) / calls_per_step)
    return num_steps, calls_per_step


def relative_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """||got - wanted|| / ||wanted|| in float64; where all that is wanted is 0, ||got||."""
    if got.shape != wanted.shape:
        raise ValueError(f"shapes differ: got {got.shape}, wanted {wanted.shape}")
    got = got.astype(np.float64)
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(got - wanted) / (norm if norm > 0 else 1.0))


def worst_row_error(got: np.ndarray, wanted: np.ndarray) -> float:
    """The largest relative error of a row (the last axis), NaN if there is any."""
    norms = np.linalg.norm(wanted, axis=-1)
    errors = np.linalg.norm(got.astype(np.float64) - wanted, axis=-1)
    return float(np.max(errors / np.where(norms > 0, norms, 1.0), initial=0.0))


def close_findings(what: str, got: np.ndarray, wanted: np.ndarray, limit: float) -> list[Finding]:
    """Whether an array is near another as a whole, and in each of its rows."""
    return [
        Finding(what=what, error=relative_error(got, wanted), limit=limit),
        Finding(
            what=f"worst row of {what}",
            error=worst_row_error(got, wanted),
            limit=ROW_LIMIT_FACTOR * limit,
        ),
    ]


def same_finding(what: str, got: np.ndarray, wanted: np.ndarray) -> Finding:
    """How many entries differ, NaN being the same as NaN."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise ValueError(
            f"{what}: got {got.dtype}{list(got.shape)}, wanted {wanted.dtype}{list(wanted.shape)}"
        )
    width = {1: np.uint8, 2: np.uint16, 4: np.uint32}[got.dtype.itemsize]
    got, wanted = np.ascontiguousarray(got), np.ascontiguousarray(wanted)
    # Few differ: to compare 8- and 16-bit floats themselves takes seconds for a cache.
    differs = got.view(width) != wanted.view(width)
    got, wanted = got[differs], wanted[differs]
    num_wrong = np.count_nonzero(~(is_nan(got) & is_nan(wanted)))
    return Finding(what=what, error=float(num_wrong), limit=0.0)


def is_nan(x: np.ndarray) -> np.ndarray:
    """NumPy has no isnan for the 8-bit floats; what is not itself is NaN, in any dtype."""
    return x != x
