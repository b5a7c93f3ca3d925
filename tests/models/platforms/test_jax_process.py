"""Models cannot be loaded in a fork of a process that has loaded one."""

import os

import pytest

from models.errors import ModelError
from models.loading.load_model import load_model
from models.platforms.jax_process import check_not_forked


def test_load_model_is_refused_in_a_fork(monkeypatch, tmp_path):
    check_not_forked()
    pid = os.getpid()
    check_not_forked()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ModelError, match=f"process {pid + 1} is a fork of process {pid}.*'spawn'"):
        load_model(tmp_path)
