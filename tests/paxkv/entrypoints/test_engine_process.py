"""Building an engine in its own process enables garbage collection afterwards, also on errors."""

import gc
from types import SimpleNamespace

import pytest

from models.errors import ModelError
from paxkv.config.engine_config import EngineConfig
from paxkv.entrypoints import engine_process
from paxkv.errors import ConfigError


@pytest.mark.parametrize("error", [None, ModelError("no weights")])
def test_garbage_collection_is_enabled_after_the_start(monkeypatch, error):
    seen = []

    def build_core(config, **_):
        seen.append(gc.isenabled())
        if error is not None:
            raise error
        return SimpleNamespace(core="core", ready="ready")

    monkeypatch.setattr(engine_process, "build_core", build_core)
    arguments = {"show_progress": False, "on_model_found": lambda folder: None}
    try:
        if error is None:
            assert engine_process.build(EngineConfig(), **arguments) == ("core", "ready")
        else:
            with pytest.raises(ConfigError, match="no weights"):
                engine_process.build(EngineConfig(), **arguments)
        assert (seen, gc.isenabled()) == ([False], True)
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
        gc.enable()
