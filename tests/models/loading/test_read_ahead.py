"""`read_ahead`: the order of weights, how far it reads ahead, what it releases and draws."""

import threading

import numpy as np
import pytest

from models.errors import CheckpointError
from models.loading import read_ahead as module
from models.loading.read_ahead import read_ahead
from models.loading.safetensors_reader import StoredWeight
from models.weight_rule import Source, WeightRule

SHAPE = (256, 1024)  # 1 MiB of float32


class Recorder:
    """A checkpoint that records which of its weights were read and released."""

    def __init__(self, tmp_path, num_weights: int, bad: int | None = None) -> None:
        self.folder = tmp_path
        self.bad = bad
        self.read_names: list[str] = []
        self.released: list[str] = []
        self.lock = threading.Lock()
        self.weights = {
            str(idx): StoredWeight(path=tmp_path, name=str(idx), shape=SHAPE, dtype="F32")
            for idx in range(num_weights)
        }

    def read(self, name: str) -> np.ndarray:
        with self.lock:
            self.read_names.append(name)
        value = np.nan if int(name) == self.bad else int(name)
        return np.full(SHAPE, value, np.float32)

    def release(self, name: str) -> None:
        self.released.append(name)


def rules_of(checkpoint: Recorder) -> list[WeightRule]:
    return [
        WeightRule(sources=(Source(name=name, shape=SHAPE),), layout="matrix", axes=(None, None))
        for name in checkpoint.weights
    ]


def test_weights_come_in_order_and_are_released_after_their_use(tmp_path):
    checkpoint = Recorder(tmp_path, 20)
    for idx, (weight,) in enumerate(read_ahead(checkpoint, rules_of(checkpoint), [False] * 20)):
        assert weight[0, 0] == idx
        assert checkpoint.released == [str(earlier) for earlier in range(idx)]
    assert len(checkpoint.released) == 20
    assert sorted(checkpoint.read_names) == sorted(checkpoint.weights)


def test_reading_ahead_stops_at_the_limit_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES_AHEAD", 4 * 2**20)
    checkpoint = Recorder(tmp_path, 20)
    for idx, _ in enumerate(read_ahead(checkpoint, rules_of(checkpoint), [False] * 20)):
        assert len(checkpoint.read_names) <= idx + 4


def test_error_names_the_weight_and_ends_the_reading(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_MAX_BYTES_AHEAD", 2 * 2**20)
    checkpoint = Recorder(tmp_path, 20, bad=3)
    with pytest.raises(CheckpointError, match="weight '3' are NaN"):
        list(read_ahead(checkpoint, rules_of(checkpoint), [False] * 20))
    assert len(checkpoint.read_names) < 20


@pytest.mark.parametrize("is_terminal", [False, True])
def test_progress_bar_is_drawn_on_a_terminal_only(tmp_path, monkeypatch, capsys, is_terminal):
    checkpoint = Recorder(tmp_path, 2)
    monkeypatch.setattr("sys.stderr.isatty", lambda: is_terminal)
    list(read_ahead(checkpoint, rules_of(checkpoint), [False] * 2))
    assert ("Loading weights: 100%" in capsys.readouterr().err) is is_terminal
