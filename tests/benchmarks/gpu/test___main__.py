"""The command line: what is missing is said before anything is tried."""

import pytest

from benchmarks.gpu import __main__ as command_line
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.sizes import MODEL_CONFIGS


def test_missing_packages_end_it_at_once(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "STEP_PACKAGES", ("json", "no_such_package"))
    assert main(["--rehearse"]) == 2
    assert "this benchmark needs no_such_package, which" in capsys.readouterr().out


def test_help_teaches_what_is_measured(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    for word in ("roofline", "first token", "throughput", "prefix", "--kernels xla", "--rehearse"):
        assert word in text


def test_models_to_choose_from_are_those_that_are_measured():
    assert set(command_line.MODELS) == set(MODEL_CONFIGS)
