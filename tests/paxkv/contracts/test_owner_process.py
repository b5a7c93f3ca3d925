"""An engine belongs to the process that created it."""

import os

import pytest

from paxkv.contracts.owner_process import OwnerProcess
from paxkv.errors import EngineDeadError


def test_check_fails_in_a_forked_process(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = OwnerProcess("this LLM")
    pid = os.getpid()
    owner.check()
    assert owner.is_current
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    assert not owner.is_current
    message = (
        f"this LLM was created in process {pid}, and process {pid + 1} is a fork of it.*'spawn'"
    )
    with pytest.raises(EngineDeadError, match=message):
        owner.check()
