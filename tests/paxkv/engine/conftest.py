"""A fake clock for tests of the engine core."""

import pytest

from paxkv.engine import burst_pacer, engine_core
from tests.paxkv.engine import fake_engine
from tests.paxkv.engine.fake_engine import FakeClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    for module in (burst_pacer, engine_core, fake_engine):
        monkeypatch.setattr(module, "time", clock)
    return clock
