"""One check or one timing on a GPU, and its result."""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["machine", "check", "time"]
Outcome = Literal["done", "absent", "failed", "died", "skipped"]

# Bodies that do not run paxkv's code; a fault in one of them does not fail the run.
PEERS = ("transformers", "jax")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The distance between one result and its expected value.

    Args:
        error: Relative error in the norm; if `limit` is 0, the number of wrong entries.
    """

    what: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        """Whether the error is small enough. False for NaN, for which every comparison is false."""
        return self.error < self.limit or self.error == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a unit measured.

    Args:
        figures: Name of the metric with its unit, such as `call_ms` -> one value per repetition.
        findings: Comparisons with expected values, if the unit computes something checkable.
        details: Further fields of the unit's rows.
    """

    figures: Mapping[str, Sequence[float]]
    findings: Sequence[Finding] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One check or one timing of one body.

    Args:
        op: An op of `pallas_kernels`, or a model.
        body: An implementation of the op, an engine, or a peer.
        measure: Runs the unit, given its seed.
        time_limit_s: The unit's process is killed if the unit takes longer on a GPU.
    """

    kind: Kind
    op: str
    case: str
    body: str
    measure: Callable[[int], Measured]
    time_limit_s: float = 60.0

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.op}|{self.case}|{self.body}"

    def seed(self, run_seed: int) -> int:
        """The unit's own seed. It differs between units, and depends only on `run_seed` and key."""
        return (run_seed + zlib.crc32(self.key.encode())) % 2**31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The outcome of a unit.

    Args:
        measured: None unless the outcome is "done".
        reason: Why there is no figure; empty if the outcome is "done".
    """

    unit: Unit
    outcome: Outcome
    measured: Measured | None = None
    reason: str = ""
    seed: int | None = None
    took_s: float = 0.0

    @property
    def wrong(self) -> list[Finding]:
        """Findings of a computed result that differs from its expected value."""
        findings = self.measured.findings if self.measured else ()
        return [finding for finding in findings if not finding.is_right]
