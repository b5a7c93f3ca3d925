"""Benchmarks run by their names, and vLLM's, where there are any."""

import runpy

import pytest

from paxkv.entrypoints.cli import bench


@pytest.fixture
def runs(monkeypatch):
    found = []

    def run_module(name, **_):
        found.append((name, bench.sys.argv))
        raise SystemExit(3)

    monkeypatch.setattr(runpy, "run_module", run_module)
    monkeypatch.setattr(bench.sys, "argv", ["here"])
    return found


@pytest.mark.parametrize(("name", "module"), [("throughput", "engine"), ("memory", "memory")])
def test_name_runs_its_module_with_the_rest_of_the_words(runs, name, module):
    assert bench.main([name, "--num-prompts", "3"]) == 3
    assert runs == [(f"benchmarks.{module}", [f"paxkv bench {name}", "--num-prompts", "3"])]


def test_unknown_name_is_answered_with_those_that_exist(runs, capsys):
    assert bench.main(["workloads"]) == 2
    error = capsys.readouterr().err
    assert "no benchmark 'workloads'" in error and "serve" in error
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    assert "compare_torch" in capsys.readouterr().out
    assert not runs


def test_installed_package_says_where_benchmarks_are(monkeypatch, tmp_path, capsys, runs):
    monkeypatch.setattr(bench.paxkv, "__file__", str(tmp_path / "paxkv" / "__init__.py"))
    assert bench.main(["serve"]) == 2
    assert "source checkout" in capsys.readouterr().err
    assert not runs


def test_benchmark_that_lacks_a_package_says_which(monkeypatch, capsys):
    def run_module(name, **_):
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr(runpy, "run_module", run_module)
    assert bench.main(["serve"]) == 2
    assert "serve needs httpx: `pip install -e '.[bench]'`" in capsys.readouterr().err
