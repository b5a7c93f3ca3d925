"""The self-test of states notices kernels that do not compute what XLA computes."""

from dataclasses import replace

import numpy as np
import pytest

import pallas_kernels
from models.cache.state_format import StateFormat
from models.cache.state_self_test import StateSelfTest

H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
FORMAT = StateFormat(shapes=((3, 5), (6, 32, 16)), num_windows=1, step_op="gated_delta_step")
TESTS = FORMAT.self_tests(None, block_size=16)


@pytest.fixture(scope="module")
def by_xla():
    return TESTS[0]._run({"implementation": "xla", "target": H200})


def test_there_is_a_test_for_each_kind_of_decay():
    assert [test.has_decay_per_row for test in TESTS] == [False, True]
    assert {(test.num_lines, test.line_size, test.dtype) for test in TESTS} == {(32, 16, "float32")}
    assert StateFormat(shapes=((3,),)).self_tests(None, block_size=16) == ()


SSD_TESTS = replace(FORMAT, step_op="ssd_step").self_tests(None, block_size=16)


@pytest.mark.parametrize("test", [*TESTS, *SSD_TESTS], ids=["decay", "decay_per_row", "ssd"])
def test_right_kernels_pass(test):
    assert test.why_kernels_differ(H200, implementation="reference") is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda out, states: (out * 1.05, states), "results of gated_delta_step"),
        (lambda out, states: (out * np.nan, states), "results of gated_delta_step"),
        (lambda out, states: (out, np.roll(states, 1, axis=0)), "states of gated_delta_step"),
        (lambda out, states: (out, states * 0.95), "states of gated_delta_step"),
    ],
    ids=["scaled results", "nan", "wrong slots", "scaled states"],
)
def test_wrong_results_are_noticed(monkeypatch, by_xla, spoil, reason):
    def run(test, chosen):
        return by_xla if chosen["implementation"] == "xla" else spoil(*by_xla)

    monkeypatch.setattr(StateSelfTest, "_run", run)
    assert reason in TESTS[0].why_kernels_differ(H200, implementation="mosaic_gpu")
