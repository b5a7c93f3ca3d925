"""The figures of loading count the arrays of the model and what the process takes beyond them."""

import math
import sys

import numpy as np
import pytest

from benchmarks.startup import loading, shapes
from benchmarks.startup.shapes import SHAPES, weight_shapes, write_shape

_SMALL = {**SHAPES["qwen3-0.6b"], "vocab_size": 512, "num_hidden_layers": 1}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_model_counts_its_arrays_and_the_peak_counts_them_too(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shapes, "SHAPES", {"small": _SMALL})
    folder = write_shape(tmp_path, "small", max_shard_bytes=10**7)
    figures = loading.measure("paxkv", folder, "float32")
    num_weights = sum(math.prod(shape) for _, shape in weight_shapes(_SMALL))
    assert figures["model_mb"] >= 4 * num_weights / 1e6  # the head may be a copy
    assert figures["peak_mb"] >= figures["model_mb"]
    assert figures["beyond_model_mb"] == figures["peak_mb"] - figures["model_mb"]
    assert figures.keys() == loading.FIGURES.keys()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_is_that_of_the_loading_and_not_of_earlier_work(tmp_path, monkeypatch) -> None:
    np.ones(2**27, np.uint8).sum()  # freed, and too large for the allocator to keep
    monkeypatch.setitem(loading.LOADERS, "none", lambda folder, dtype: lambda: 0)
    assert loading.measure_here("none", str(tmp_path), "float32")["peak_mb"] < 50


def test_table_and_rows_have_every_figure() -> None:
    figures = {"paxkv": {name: [1.0, 3.0] for name in loading.FIGURES}}
    rows = loading.result_rows(figures, "shape=x", device="cpu", shard_sizes=[10**6, 2 * 10**6])
    assert [row.metric for row in rows] == [*loading.FIGURES]
    assert rows[0].as_dict()["shard_mb"] == [1, 2]
    assert all(label in loading.table(figures) for label in loading.FIGURES.values())
