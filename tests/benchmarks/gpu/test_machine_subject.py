"""The bandwidth counts what is read and what is written."""

import pytest

from benchmarks.gpu import machine_subject
from benchmarks.gpu.machine_subject import MachineSubject
from benchmarks.gpu.sizes import REHEARSAL


def test_bandwidth_is_that_of_the_better_program(monkeypatch):
    num_bytes = REHEARSAL.num_copied_bytes
    monkeypatch.setattr(machine_subject, "measure_copy", lambda **_: {"samples_s": [2.0, 1.0, 4.0]})
    monkeypatch.setattr(machine_subject, "measure_add_one", lambda **_: {"samples_s": [1.0, 0.5]})
    figures = MachineSubject(is_rehearsal=True).copy(seed=0)["figures"]
    assert figures == {"copy_gb_per_s": pytest.approx([2e-9 * num_bytes, 4e-9 * num_bytes])}
