"""Every op is checked and timed on a GPU; a wrong result is found, and then not timed."""

import json
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels
from benchmarks.ops.__main__ import main
from benchmarks.ops.gpu import all_units
from benchmarks.units.unit import Unit

# Op -> the op with a fault in its result.
WRONG = {
    "paged_attention": lambda result: jax.tree.map(lambda x: x * 1.1, result),
    "latent_attention": lambda out: out.at[0, 0].set(out[0, 1]),
    "kv_scatter": lambda cache: cache.at[0, 0, 0, 0].set(0.0),
    "slot_mapping": lambda slots: slots + 1,
    "merge_attention_states": lambda state: (state[0], state[1] + 0.1),
    "grouped_matmul": lambda out: out * 1.1,
    "block_copy": lambda pages: pages.at[-1, -1].set(0),
    "block_gather": lambda values: values.at[-1].set(0),
    "block_scatter": lambda pages: pages.at[-1].set(0),
    "causal_conv1d": lambda result: (result[0], result[1] + 0.1),
    "gated_delta_rule": lambda result: (result[0] * 1.1, result[1]),
    "gated_delta_step": lambda result: (result[0], result[1] * 1.1),
    "index_top_k": lambda positions: positions.at[0, 0].set(positions[0, 0] + 1),
    "rg_lru_scan": lambda result: (result[0], result[1] * 1.1),
    "scaled_grouped_matmul": lambda out: out * 1.1,
    "scaled_matmul": lambda out: out * 1.1,
    "selective_scan": lambda result: (result[0], result[1] * 1.1),
    "selective_step": lambda result: (result[0], result[1] * 1.1),
    "sparse_latent_attention": lambda out: out * 1.1,
    "sparse_paged_attention": lambda out: out * 1.1,
    "ssd_scan": lambda result: (result[0], result[1] * 1.1),
    "ssd_step": lambda result: (result[0], result[1] * 1.1),
}
ALL_OPS = {file.parent.name for file in Path(pallas_kernels.__file__).parent.glob("*/api.py")}


@pytest.mark.parametrize("is_rehearsal", [False, True])
def test_each_op_is_checked_and_timed_once_per_case(is_rehearsal: bool) -> None:
    units = all_units(is_rehearsal=is_rehearsal)
    for kind in ("check", "time"):
        ops = {unit.op for unit in units if unit.kind == kind and unit.body == "xla"}
        assert ops == set(WRONG) == ALL_OPS
    assert len({unit.key for unit in units}) == len(units)


def first(kind: str, op: str) -> Unit:
    units = all_units(is_rehearsal=True)
    return next(unit for unit in units if (unit.kind, unit.op, unit.body) == (kind, op, "xla"))


@pytest.mark.parametrize("op", WRONG)
def test_op_is_right_and_a_planted_fault_is_found_and_not_timed(op: str, monkeypatch) -> None:
    waited_for = mock.Mock(wraps=jax.block_until_ready)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "block_until_ready", waited_for)
        measured = first("check", op).measure(11)
    assert measured.findings and all(finding.is_right for finding in measured.findings)
    assert len(measured.figures["relative_error"]) == 1
    right_outputs = jax.device_get(waited_for.call_args.args[0])

    def planted(*args, **kwargs):
        # The right outputs are constants here, because the bodies would take longer to compile.
        # They stand in for the reference's too: the first check has found both to be close.
        outputs = jax.tree.map(jnp.asarray, right_outputs)
        return outputs if kwargs["implementation"] == "reference" else WRONG[op](outputs)

    monkeypatch.setattr(pallas_kernels, op, planted)
    # Only paged_attention is verified in another way before it is timed.
    for kind in ("check", "time") if op == "paged_attention" else ("time",):
        measured = first(kind, op).measure(11)
        assert not all(finding.is_right for finding in measured.findings)
        assert "call_ms" not in measured.figures


@pytest.mark.slow
def test_rehearsal_runs_in_processes(tmp_path) -> None:
    out = tmp_path / "rows.jsonl"
    command = ["--platform", "gpu", "--rehearse", "--only", "kv_scatter|bfloat16|xla"]
    assert main([*command, "--out", str(out)]) == 0
    rows = {row["unit"]: row for row in map(json.loads, out.read_text().splitlines())}
    assert rows["check|kv_scatter|bfloat16|xla"]["is_right"] is True
    timed = rows["time|kv_scatter|bfloat16|xla"]
    assert timed["metric"] == "call_ms" and timed["median"] > 0 and timed["num_bytes"] > 0
    assert rows["machine|device|copy|jax"]["median"] > 0
    text = (tmp_path / "rows.ops.md").read_text()
    assert text.splitlines()[0].endswith(" (rehearsal)") and "| kv_scatter |" in text
