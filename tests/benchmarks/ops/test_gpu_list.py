"""The list holds what is wanted, each unit once, the most telling first."""

import pytest

from benchmarks.ops.gpu_list import all_units

WANTED_TIMINGS = {
    ("paged_attention", "decode 64x8,192, block 16", (0.85,)),
    ("paged_attention", "decode 64x8,192, block 64", (0.85,)),
    ("paged_attention", "decode 8x32,768, block 16", (0.80,)),
    ("paged_attention", "decode 256x1,024, block 16", (0.70,)),
    ("paged_attention", "ragged prompt 8,192", (450.0, 600.0)),
    ("mla_decode", "64x8,192, 16 heads", (0.70,)),
    ("mla_decode", "64x8,192, 128 heads", (0.70,)),
    ("kv_scatter", "8,192 tokens", (0.70,)),
    ("slot_mapping", "8,192 tokens of 32 requests", (10.0,)),
}
OPS = {
    "paged_attention",
    "cascade_attention",
    "mla_decode",
    "kv_scatter",
    "slot_mapping",
    "merge_attention_states",
    "block_copy",
    "block_gather",
    "block_scatter",
}


@pytest.mark.parametrize("body", ["mosaic_gpu", "xla"])
def test_each_wanted_figure_is_timed(body: str) -> None:
    wanted = {
        (unit.op, unit.case, unit.wanted.values)
        for unit in all_units(is_rehearsal=False)
        if unit.body == body and unit.wanted
    }
    assert wanted == WANTED_TIMINGS


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_each_op_is_checked_and_timed(is_rehearsal: bool) -> None:
    units = all_units(is_rehearsal=is_rehearsal)
    for kind in ("check", "time"):
        assert {unit.op for unit in units if unit.kind == kind} == OPS
    assert len({unit.key for unit in units}) == len(units)
    assert [unit.kind for unit in units] == sorted(
        (unit.kind for unit in units), key=["machine", "check", "time"].index
    )


def test_peers_are_timed_on_the_same_batches() -> None:
    units = [u for u in all_units(is_rehearsal=False) if u.kind == "time"]
    ours = {unit.case for unit in units if unit.body == "mosaic_gpu"}
    for peer in ("jax cudnn", "jax xla dense", "torch sdpa", "torch flex"):
        cases = {unit.case for unit in units if unit.body == peer}
        assert cases and cases <= ours


def test_one_op_alone_keeps_the_machine() -> None:
    units = all_units(is_rehearsal=False, only="kv_scatter")
    assert {unit.op for unit in units if unit.kind != "machine"} == {"kv_scatter"}
    assert {unit.kind for unit in units} == {"machine", "check", "time"}
    with pytest.raises(ValueError, match="no such op: got 'kv_scater', wanted one of"):
        all_units(is_rehearsal=False, only="kv_scater")


def test_one_body_alone() -> None:
    units = all_units(is_rehearsal=False, body="torch")
    assert {unit.body for unit in units if unit.kind != "machine"} == {"torch sdpa", "torch flex"}
    with pytest.raises(ValueError, match="no such body: got 'triton', wanted one of"):
        all_units(is_rehearsal=False, body="triton")


def test_quick_is_a_part() -> None:
    units, quick = (all_units(is_rehearsal=False, is_quick=is_quick) for is_quick in (False, True))
    assert 20 < len(quick) < len(units) / 4
