"""Benchmarks run by their names or vLLM's names, if they are installed."""

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
def test_benchmark_runs_with_the_remaining_arguments(runs, name, module):
    assert bench.main([name, "--num-prompts", "3"]) == 3
    assert runs == [(f"benchmarks.{module}", [f"paxkv bench {name}", "--num-prompts", "3"])]


def test_error_for_an_unknown_benchmark_lists_all_benchmarks(runs, capsys):
    assert bench.main(["workloads"]) == 2
    error = capsys.readouterr().err
    assert "no benchmark 'workloads'" in error and "serve" in error
    assert bench.main([]) == 2
    assert bench.main(["--help"]) == 0
    assert "compare_torch" in capsys.readouterr().out
    assert not runs


def test_installed_package_explains_where_benchmarks_are(monkeypatch, tmp_path, capsys, runs):
    monkeypatch.setattr(bench.paxkv, "__file__", str(tmp_path / "paxkv" / "__init__.py"))
    assert bench.main(["serve"]) == 2
    assert "source checkout" in capsys.readouterr().err
    assert not runs


def test_error_names_the_package_that_a_benchmark_needs(monkeypatch, capsys):
    def run_module(name, **_):
        raise ModuleNotFoundError("No module named 'httpx'", name="httpx")

    monkeypatch.setattr(runpy, "run_module", run_module)
    assert bench.main(["serve"]) == 2
    assert "serve needs httpx: `pip install -e '.[bench]'`" in capsys.readouterr().err
