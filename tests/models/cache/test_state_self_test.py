"""The self-test of states notices kernels that do not compute what XLA computes."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import pallas_kernels
from models.cache.state_format import StateFormat
from models.cache.state_self_test import StateSelfTest
from pallas_kernels.dispatch import MIN_JAX_FOR_MOSAIC_GPU

H200 = pallas_kernels.Target(platform="gpu", device_kind="NVIDIA H200", compute_capability="9.0")
FORMAT = StateFormat(shapes=((3, 5), (6, 32, 16)), num_windows=1, step_op="gated_delta_step")
TESTS = FORMAT.self_tests(None, block_size=16)


@pytest.fixture(scope="module")
def by_xla():
    return TESTS[0]._run({"implementation": "xla", "target": H200})


def test_there_is_a_test_for_each_kind_of_decay_and_of_page():
    kinds = {(test.page_size // 16, test.has_decay_per_row) for test in TESTS}
    assert kinds == {(48, False), (48, True), (12, False), (12, True)} and len(TESTS) == 4
    assert [test.page_size // 16 for test in SSD_TESTS] == [48, 12]
    assert [test.page_size // 128 for test in SELECTIVE_TESTS] == [48, 47]
    assert {(test.num_lines, test.line_size, test.dtype) for test in TESTS} == {(32, 16, "float32")}
    assert StateFormat(shapes=((3,),)).self_tests(None, block_size=16) == ()


SSD_TESTS = replace(FORMAT, step_op="ssd_step").self_tests(None, block_size=16)
SELECTIVE_TESTS = replace(
    FORMAT, step_op="selective_step", shapes=((3, 5), (6, 32, 256))
).self_tests(None, block_size=16)


needs_mosaic_gpu = pytest.mark.skipif(
    jax.__version_info__ < MIN_JAX_FOR_MOSAIC_GPU,
    reason="Mosaic GPU bodies need JAX 0.11.2 or newer",
)


@needs_mosaic_gpu
def test_kernels_load_16_and_4_lines_at_a_time():
    from pallas_kernels.state_tiles import StatePlan

    found = []
    for test in TESTS[::2]:
        states = test._states(np.random.default_rng(0))
        found.append(StatePlan.of(states, (2, test.num_lines, test.line_size)).lines_at_a_time)
    assert found == [16, 4]


@needs_mosaic_gpu
def test_kernels_of_selective_step_load_256_and_128_numbers_at_a_time():
    from pallas_kernels.selective_step.mosaic_gpu import _channels_per_cta

    states = [test._states(np.random.default_rng(0)) for test in SELECTIVE_TESTS]
    assert [_channels_per_cta(each, (2, 32, 256)) for each in states] == [256, 128]


# All decays in large pages, and one in small pages. Small pages of the other ops are slow tests.
@pytest.mark.parametrize(
    "test",
    [
        pytest.param(TESTS[0], id="decay"),
        pytest.param(TESTS[1], id="decay_per_row"),
        pytest.param(TESTS[2], id="small"),
        pytest.param(SSD_TESTS[0], id="ssd"),
        pytest.param(SSD_TESTS[1], id="ssd_small", marks=pytest.mark.slow),
        pytest.param(SELECTIVE_TESTS[0], id="selective"),
        pytest.param(SELECTIVE_TESTS[1], id="selective_small", marks=pytest.mark.slow),
    ],
)
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
