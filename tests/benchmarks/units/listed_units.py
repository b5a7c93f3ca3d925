"""Units for tests, which do what the name of their case says."""

import os
import time

from benchmarks.units.unit import Finding, Measured, Unit


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    return [
        Unit(
            kind="check",
            op="op",
            case=case,
            body=body,
            measure=lambda seed, case=case: _measure(case),
            silence_limit_s=2.0,
        )
        for case, body in (
            ("first", "ours"),
            ("kills", "ours"),
            ("raises", "ours"),
            ("kills again", "ours"),
            ("wrong", "ours"),
            ("last", "ours"),
            ("hangs", "other"),
            ("other", "other"),
        )
    ]


def _measure(case: str) -> Measured:
    if "kills" in case:
        print("illegal address", flush=True)
        os.abort()
    if case == "hangs":
        time.sleep(1000)
    if case == "raises":
        raise ValueError("no")
    finding = Finding(what="out", error=float(case == "wrong"), limit=0.5)
    return Measured(figures={"ms": [1.0, 3.0, 2.0]}, findings=[finding])
