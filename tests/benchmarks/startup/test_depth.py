"""Each kind of model has the number of layers that is asked for; the ratio is of CPU seconds."""

import json
import sys

import pytest

from benchmarks.startup import depth
from models.registry import read_config


@pytest.mark.parametrize("kind", depth.KINDS)
def test_config_is_one_that_the_engine_reads(kind) -> None:
    for num_layers in (8, 12):
        assert read_config(depth.config_of(kind, num_layers)).num_layers == num_layers


def test_rows_and_ratio_are_those_of_the_measured_processes(tmp_path, monkeypatch, capsys) -> None:
    """A measured process uses CPU time in proportion to the layers of its config.json."""
    program = (
        "import json, sys, time\n"
        "folder = sys.argv[sys.argv.index('--model') + 1]\n"
        "config = json.load(open(folder + '/config.json'))\n"
        "while time.process_time() < config['num_hidden_layers'] / 16: pass\n"
        "assert sys.argv[-2:] == ['--dtype', 'float32']\n"
    )
    monkeypatch.setattr(depth, "COMPILE_COMMAND", (sys.executable, "-c", program))
    out = tmp_path / "rows.jsonl"
    arguments = ["--kinds", "mamba2", "--layers", "4", "16", "--out", str(out)]
    assert depth.main([*arguments, "--", "--dtype", "float32"]) == 0
    few, many = map(json.loads, out.read_text().splitlines())
    assert few["case"] == "kind=mamba2 num_layers=4 flags=--dtype float32"
    assert 0.25 <= few["median"] and 1 <= many["median"]
    printed = capsys.readouterr().out.splitlines()[-1]
    assert float(printed.split("|")[-2]) == pytest.approx(many["median"] / few["median"], rel=0.01)
