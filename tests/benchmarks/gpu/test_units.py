"""The list of units: each can be measured by its subject, and the whole fits its time."""

import inspect

import pytest

from benchmarks.gpu.paxkv_subject import PaxkvSubject
from benchmarks.gpu.units import PAXKV, all_groups, all_units, subject_of


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_no_two_units_have_one_name(is_rehearsal):
    keys = [unit.key for unit in all_units(is_rehearsal=is_rehearsal)]
    assert len(keys) == len(set(keys)) > 40


def test_groups_are_of_one_subject_each_and_load_first():
    for group in all_groups(is_rehearsal=False)[1:]:
        assert len({str(subject_of(unit)) for unit in group.units}) == 1
        assert group.units[0].measure == "load"


def test_one_model_alone_has_more_time():
    both, one = (all_groups(is_rehearsal=False, only=only) for only in (None, "qwen3-0.6b"))
    assert {unit.op for group in one for unit in group.units} == {"machine", "qwen3-0.6b"}
    limits = {group.units[0].key: group.limit_s for group in both}
    assert all(group.limit_s > limits[group.units[0].key] for group in one[1:])


def test_paxkv_has_every_measurement_with_these_options():
    for unit in all_units(is_rehearsal=False):
        if unit.body.startswith(PAXKV):
            method = getattr(PaxkvSubject, unit.measure)
            seed = {} if unit.measure == "load" else {"seed": 0}
            inspect.signature(method).bind(None, **unit.options, **seed)


def test_kernels_xla_is_asked_for_by_its_units_alone():
    kernels = {
        unit.body: subject_of(unit)[1].get("kernels") for unit in all_units(is_rehearsal=False)
    }
    assert kernels == {
        "copy": None,
        "paxkv": "auto",
        "paxkv, --kernels xla": "xla",
        "transformers": None,
    }
