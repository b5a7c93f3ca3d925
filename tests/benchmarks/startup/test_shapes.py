"""The random checkpoints have the published shapes, and the engine's reader finds every weight."""

import json
import math

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.startup import shapes
from benchmarks.startup.shapes import SHAPES, weight_shapes, write_shape
from models.registry import read_config


@pytest.mark.parametrize(
    ("name", "num_params"),
    # As the files on the hub state them.
    [
        ("qwen3-0.6b", 596_049_920),
        ("gemma-3-1b", 999_885_952),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_number_of_weights_is_the_published_one(name, num_params) -> None:
    assert sum(math.prod(shape) for _, shape in weight_shapes(SHAPES[name])) == num_params


@pytest.mark.parametrize("name", SHAPES)
def test_config_is_one_that_the_engine_reads(name) -> None:
    config = SHAPES[name]
    read = read_config(config)
    assert len(read.attention) == config["num_hidden_layers"]
    assert read.max_position_embeddings == config["max_position_embeddings"]


@pytest.mark.parametrize("name", SHAPES)
def test_written_file_holds_weights_of_the_right_scale(name, tmp_path, monkeypatch) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    monkeypatch.setattr(shapes, "SHAPES", {name: {**SHAPES[name], **small}})
    write_shape(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    weights = load_file(tmp_path / "model.safetensors")
    assert {key: value.shape for key, value in weights.items()} == dict(weight_shapes(config))
    down_np = np.asarray(weights["model.layers.1.mlp.down_proj.weight"], np.float32)
    assert down_np.std() == pytest.approx(48**-0.5, rel=0.1)
    norm_np = np.asarray(weights["model.norm.weight"], np.float32)
    assert set(norm_np.tolist()) == {0.0 if name == "gemma-3-1b" else 1.0}


def test_shards_hold_the_same_weights_as_one_file(tmp_path, monkeypatch) -> None:
    small = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    monkeypatch.setattr(shapes, "SHAPES", {"small": {**SHAPES["qwen3-0.6b"], **small}})
    whole = write_shape(tmp_path / "whole", "small")
    shards = write_shape(tmp_path / "shards", "small", max_shard_bytes=10_000)
    paths = sorted(shards.glob("*.safetensors"))
    assert len(paths) > 2
    index = json.loads((shards / "model.safetensors.index.json").read_text())["weight_map"]
    weights = {}
    for path in paths:
        of_file = load_file(path)
        assert {index[name] for name in of_file} == {path.name}
        # The query projection alone is larger than the limit.
        assert sum(value.nbytes for value in of_file.values()) <= 10_000 or len(of_file) == 1
        weights |= of_file
    wanted = load_file(whole / "model.safetensors")
    assert weights.keys() == wanted.keys()
    assert all(np.array_equal(weights[name], wanted[name]) for name in wanted)
