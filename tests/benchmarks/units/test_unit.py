"""Findings judge errors, and what a unit measured survives the way through JSON."""

import json
import math

import pytest

from benchmarks.units.unit import (
    Finding,
    Measured,
    Unit,
    measured_as_json,
    measured_from_json,
)


@pytest.mark.parametrize("error", [math.nan, math.inf, 1e-2, 0.5])
def test_nan_and_the_limit_itself_are_wrong(error: float) -> None:
    assert not Finding(what="out", error=error, limit=1e-2).is_right
    assert Finding(what="out", error=0.0, limit=0.0).is_right


def test_measured_is_read_back_and_a_nan_error_stays_wrong() -> None:
    finding = Finding(what="out", error=math.nan, limit=1.0)
    measured = Measured(figures={"ms": [1.0]}, findings=[finding], details={"num_bytes": 7})
    text = json.dumps(measured_as_json(measured), allow_nan=False)
    read = measured_from_json(json.loads(text))
    assert (read.figures, read.details) == (measured.figures, measured.details)
    assert not read.findings[0].is_right


def test_seeds_differ_between_units_and_runs() -> None:
    first, second = (
        Unit(kind="check", op="op", case=case, body="xla", measure=lambda seed: None)
        for case in ("first", "second")
    )
    assert first.seed(1) == first.seed(1)
    assert len({first.seed(1), first.seed(2), second.seed(1)}) == 3
