"""Every op is checked and timed on a GPU; a wrong result is found, and then not timed."""

import pytest

import pallas_kernels
from benchmarks.command_line import BenchmarkError
from benchmarks.ops import device_calls, gpu
from benchmarks.ops.__main__ import main
from benchmarks.ops.gpu import all_units, chosen_units, groups_of
from benchmarks.units.unit import Unit

OPS = {
    *("paged_attention", "mla_decode", "kv_scatter", "slot_mapping", "merge_attention_states"),
    *("block_copy", "block_gather", "block_scatter"),
}
REHEARSED = all_units(is_rehearsal=True)


def first(kind: str, op: str) -> Unit:
    return next(u for u in REHEARSED if (u.kind, u.op, u.body) == (kind, op, "xla"))


@pytest.fixture(autouse=True)
def short_timings(monkeypatch) -> None:
    monkeypatch.setattr(device_calls, "SAMPLE_S", 1e-4)
    monkeypatch.setattr(device_calls, "NUM_SAMPLES", 3)


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_each_op_is_checked_and_timed_once_per_case(is_rehearsal: bool) -> None:
    units = all_units(is_rehearsal=is_rehearsal)
    for kind in ("check", "time"):
        assert {unit.op for unit in units if unit.kind == kind and unit.body == "xla"} == OPS
    assert len({unit.key for unit in units}) == len(units)
    # Checks come before timings, and peers last.
    order = [("machine", "check", "time").index(unit.kind) for unit in units]
    assert order == sorted(order) and not units[-1].is_ours
    ours = {unit.case for unit in units if unit.kind == "time" and unit.body == "xla"}
    for peer in ("jax cudnn", "jax xla dense", "torch sdpa"):
        cases = {unit.case for unit in units if unit.body == peer}
        assert cases and cases <= ours


def test_processes_have_few_units_of_one_kind_of_code() -> None:
    groups = groups_of(all_units(is_rehearsal=False))
    assert max(map(len, groups)) <= gpu.MAX_UNITS_PER_GROUP
    for group in groups:
        assert len({unit.body.startswith("torch") for unit in group}) == 1
        assert len({unit.body.startswith("mosaic") for unit in group}) == 1


def test_one_op_and_one_body_can_be_chosen() -> None:
    units = chosen_units(is_rehearsal=False, op="kv_scatter", body="mosaic")
    assert {(u.op, u.body) for u in units if u.kind != "machine"} == {("kv_scatter", "mosaic_gpu")}
    with pytest.raises(BenchmarkError, match="no such op: got 'kv_scater'"):
        chosen_units(is_rehearsal=False, op="kv_scater", body=None)


@pytest.mark.parametrize("op", sorted(OPS))
def test_op_agrees_with_float64(op: str) -> None:
    measured = first("check", op).measure(11)
    assert measured.findings and all(finding.is_right for finding in measured.findings)
    assert len(measured.figures["relative_error"]) == 1


@pytest.mark.parametrize("op", ["kv_scatter", "slot_mapping"])
def test_right_op_is_timed(op: str) -> None:
    measured = first("time", op).measure(11)
    assert min(measured.figures["call_ms"]) > 0 and measured.details["num_bytes"] > 0


WRONG = {
    "paged_attention": lambda result: (result[0] * 1.1, result[1]),
    "mla_decode": lambda out: out.at[0, 0].set(out[0, 1]),
    "kv_scatter": lambda caches: (caches[0].at[0, 0, 0, 0].set(0.0), caches[1]),
    "slot_mapping": lambda slots: slots + 1,
    "merge_attention_states": lambda state: (state[0], state[1] + 0.1),
    "block_copy": lambda caches: (caches[0], caches[1].at[-1, -1].set(0)),
    "block_gather": lambda blocks: (blocks[0], blocks[1].at[-1].set(0)),
    "block_scatter": lambda caches: (caches[0].at[-1].set(0), caches[1]),
}


@pytest.mark.parametrize("op", sorted(OPS))
def test_planted_fault_is_found_and_not_timed(op: str, monkeypatch) -> None:
    right = getattr(pallas_kernels, op)
    monkeypatch.setattr(pallas_kernels, op, lambda *args, **kw: WRONG[op](right(*args, **kw)))
    kind = "time" if op in ("kv_scatter", "slot_mapping", "block_copy") else "check"
    measured = first(kind, op).measure(11)
    assert not all(finding.is_right for finding in measured.findings)
    assert "call_ms" not in measured.figures


def test_command_lists_units_and_refuses_flags_of_the_other_platform(capsys) -> None:
    assert main(["--platform", "gpu", "--list", "--only", "kv_scatter"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {"time|kv_scatter|8,192 tokens|mosaic_gpu", "check|kv_scatter|middle_row|xla"} <= set(
        lines
    )
    for flags in (["cpu", "--resume"], ["gpu", "--quick"]):
        with pytest.raises(SystemExit):
            main(["--platform", *flags])
