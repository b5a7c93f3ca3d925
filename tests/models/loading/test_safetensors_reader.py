"""Reading single files and indexes, and errors about the index."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from models.errors import CheckpointError, CheckpointNotFoundError
from models.loading.safetensors_reader import SafetensorsCheckpoint

INDEX = "model.safetensors.index.json"


def write_index(folder, weight_map):
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def test_headers_tell_shape_and_dtype_and_data_comes_on_demand(tmp_path):
    values = np.arange(6).reshape(2, 3).astype(ml_dtypes.bfloat16)
    save_file({"w": values}, tmp_path / "model.safetensors")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert (checkpoint.weights["w"].shape, checkpoint.weights["w"].dtype) == ((2, 3), "BF16")
    assert checkpoint.read("w").dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(checkpoint.read("w"), values)


def test_index_joins_files(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "one.safetensors")
    save_file({"b": np.ones(2, np.float32)}, tmp_path / "two.safetensors")
    write_index(tmp_path, {"a": "one.safetensors", "b": "two.safetensors"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert sorted(checkpoint.weights) == ["a", "b"]
    assert checkpoint.read("b").tolist() == [1.0, 1.0]


def test_file_that_the_index_names_and_is_missing_is_named(tmp_path):
    write_index(tmp_path, {"a": "gone.safetensors"})
    with pytest.raises(CheckpointNotFoundError, match=r"gone\.safetensors"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"weight_map": {"a": 1}}', pytest.param("[" * 10**5, id="nested")],
)
def test_malformed_index_is_named(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        SafetensorsCheckpoint(tmp_path)


def test_empty_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="has 0 bytes"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "{folder}/outside.safetensors", "sub/../../outside.safetensors"],
)
def test_index_that_leads_outside_its_folder_is_refused(tmp_path, name):
    """Also where the file is there, and readable."""
    folder = tmp_path / "checkpoint"
    (folder / "sub").mkdir(parents=True)
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "outside.safetensors")
    write_index(folder, {"a": name.format(folder=tmp_path)})
    with pytest.raises(CheckpointError, match=r"outside its folder: '.*outside\.safetensors'"):
        SafetensorsCheckpoint(folder)


def test_files_may_be_links_and_lie_in_subfolders(tmp_path):
    """As in the Hub's cache."""
    folder = tmp_path / "snapshots"
    (folder / "sub").mkdir(parents=True)
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "blob")
    (folder / "sub" / "one.safetensors").symlink_to(tmp_path / "blob")
    write_index(folder, {"a": "sub/one.safetensors"})
    assert SafetensorsCheckpoint(folder).read("a").tolist() == [1.0]
