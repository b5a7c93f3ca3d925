"""A report has the facts of the machine, but no secrets."""

import importlib.metadata

import jax

import paxkv
from paxkv.entrypoints.cli import collect_env


def test_report_has_versions_devices_and_folders(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    facts = dict(collect_env.facts())
    assert facts["paxkv"] == paxkv.__version__
    assert facts["jax"] == importlib.metadata.version("jax")
    assert facts["device 0"].startswith(jax.devices()[0].platform)
    assert facts["OMP_NUM_THREADS"] == "3"
    assert "not installed" in facts.values()
    assert facts["cache of compiled programs"].endswith(("paxkv", "paxkv/compiled"))


def test_report_has_no_secrets(monkeypatch, capsys):
    for name in ("PAXKV_API_KEY", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "geheim")
    assert collect_env.main([]) == 0
    text = capsys.readouterr().out
    assert "python: " in text
    assert "geheim" not in text and "API_KEY" not in text


def test_report_shows_a_missing_device(monkeypatch):
    def fail():
        raise RuntimeError("no TPU here")

    monkeypatch.setattr(jax, "devices", fail)
    assert dict(collect_env.facts())["devices"] == "none: no TPU here"
