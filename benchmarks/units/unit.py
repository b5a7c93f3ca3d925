"""The unit of GPU work: one check or one timing of one body, and what came of it."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

Kind = Literal["machine", "check", "time"]
Outcome = Literal["done", "absent", "failed", "died", "skipped"]

# Bodies of other libraries; a fault in one of them does not fail the run.
PEERS = ("torch", "transformers", "jax")


class AbsentError(Exception):
    """A package, a body or a device that the unit needs is not available."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The distance between one result and its expected value.

    Args:
        error: Relative error in the norm; the number of wrong entries where `limit` is 0.
    """

    what: str
    error: float
    limit: float

    @property
    def is_right(self) -> bool:
        """False for NaN, which compares with nothing."""
        return self.error < self.limit or self.error == 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What a unit measured.

    Args:
        figures: Metric with its unit, such as `call_ms` -> one value per repetition.
        findings: Comparisons with float64, if the unit computes something that can be checked.
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
        silence_limit_s: The unit's process is killed after this long without an event.
    """

    kind: Kind
    op: str
    case: str
    body: str
    measure: Callable[[int], Measured]
    silence_limit_s: float = 90.0

    @property
    def key(self) -> str:
        return f"{self.kind}|{self.op}|{self.case}|{self.body}"

    @property
    def family(self) -> str:
        """Units that share a kernel and therefore its crashes; decode has kernels of its own."""
        decode = " decode" if self.case.startswith("decode") else ""
        return f"{self.op} {self.body}{decode}"

    @property
    def is_ours(self) -> bool:
        return not self.body.startswith(PEERS)

    def seed(self, run_seed: int) -> int:
        """Differs between units; equal again for an equal `run_seed`."""
        return (run_seed + zlib.crc32(self.key.encode())) % 2**31


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What became of a unit.

    Args:
        measured: None unless the outcome is "done".
        reason: Why there is no figure.
    """

    unit: Unit
    outcome: Outcome
    measured: Measured | None = None
    reason: str = ""
    seed: int | None = None
    took_s: float = 0.0

    @property
    def is_wrong(self) -> bool:
        """True if something was computed and differs from its expected value."""
        findings = self.measured.findings if self.measured else ()
        return not all(finding.is_right for finding in findings)

    @property
    def is_our_fault(self) -> bool:
        return self.unit.is_ours and (self.outcome in ("failed", "died") or self.is_wrong)


def measured_as_json(measured: Measured) -> dict[str, Any]:
    """Fields of an event; NaN, which JSON lacks, becomes null."""
    return {
        "figures": {name: list(values) for name, values in measured.figures.items()},
        "findings": [
            {
                "what": finding.what,
                "error": finding.error if math.isfinite(finding.error) else None,
                "limit": finding.limit,
            }
            for finding in measured.findings
        ],
        "details": dict(measured.details),
    }


def measured_from_json(fields: Mapping[str, Any]) -> Measured:
    """Reads what `measured_as_json` made; a null error is NaN."""
    findings = [
        Finding(
            what=f["what"],
            error=math.nan if f["error"] is None else f["error"],
            limit=f["limit"],
        )
        for f in fields["findings"]
    ]
    return Measured(figures=fields["figures"], findings=findings, details=fields["details"])
