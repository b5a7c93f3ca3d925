"""Fixtures that the tests of `paxkv/entrypoints` share."""

import pytest

from tests.paxkv.fake_build import FakeRunner, fake_model_parts


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> type[FakeRunner]:
    """The class of the runners that are built, in place of a real model and its runner."""
    return fake_model_parts(monkeypatch)
