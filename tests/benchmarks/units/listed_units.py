"""Units for tests, which do what the name of their case says."""

import functools
import math
import os
import time

from benchmarks.units.unit import Finding, Measured, Unit


def all_units(*, is_rehearsal: bool) -> list[Unit]:
    cases = ("first", "kills", "raises", "absent", "wrong", "nan", "kills again", "hangs", "last")
    return [
        Unit(
            kind="check",
            op="op",
            case=case,
            body="ours",
            measure=functools.partial(_measure, case),
            time_limit_s=1.0 if case == "hangs" else 60.0,
        )
        for case in cases
    ]


def _measure(case: str, seed: int) -> Measured:
    if "kills" in case:
        print("illegal address", flush=True)
        os.abort()
    if case == "hangs":
        time.sleep(1000)
    if case == "raises":
        raise ValueError("wrong length")
    if case == "absent":
        raise ValueError("op: the body 'x' cannot do this call: it needs a GPU")
    error = {"wrong": 1.0, "nan": math.nan}.get(case, 0.0)
    finding = Finding(what="out", error=error, limit=0.5)
    return Measured(figures={"ms": [1.0, 3.0, 2.0]}, findings=[finding], details={"drawn": seed})
