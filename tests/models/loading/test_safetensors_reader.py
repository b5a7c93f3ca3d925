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


def test_headers_have_shape_and_dtype_and_data_is_read_on_demand(tmp_path):
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
    allowed = "is not a safetensors index|must contain a JSON object|not valid JSON"
    with pytest.raises(CheckpointError, match=rf"index\.json.*({allowed})"):
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
    """Even if the file exists and is readable."""
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


def save_shards(folder, *names, total):
    for number, name in enumerate(names, start=1):
        path = folder / f"model-{number:05}-of-{total:05}.safetensors"
        save_file({name: np.full(1, number, np.float32)}, path)


def test_a_complete_set_of_files_needs_no_index(tmp_path):
    save_shards(tmp_path, "a", "b", total=2)
    assert sorted(SafetensorsCheckpoint(tmp_path).weights) == ["a", "b"]


def test_files_that_are_missing_are_named_without_an_index_too(tmp_path):
    save_shards(tmp_path, "a", "b", total=4)
    with pytest.raises(CheckpointNotFoundError, match="2 of the 4 weight files are missing: 3, 4"):
        SafetensorsCheckpoint(tmp_path)


def test_the_single_file_wins_over_others(tmp_path, caplog):
    save_file({"new": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    write_index(tmp_path, {"old": "gone.safetensors"})
    assert [*SafetensorsCheckpoint(tmp_path).weights] == ["new"]
    assert not caplog.records
    save_shards(tmp_path, "old", total=1)
    assert [*SafetensorsCheckpoint(tmp_path).weights] == ["new"]
    assert "has model.safetensors and also model-00001-of-00001.safetensors" in caplog.text


@pytest.mark.parametrize("file", ["one.safetensors", "two.safetensors"])
def test_the_index_decides_between_two_files_with_the_same_weight(tmp_path, file):
    save_file({"a": np.ones(1, np.float32)}, tmp_path / "one.safetensors")
    two = {"a": np.full(1, 2, np.float32), "b": np.zeros(1, np.float32)}
    save_file(two, tmp_path / "two.safetensors")
    other = ({"one.safetensors", "two.safetensors"} - {file}).pop()
    write_index(tmp_path, {"a": file, "b": other})
    wanted = {"one.safetensors": [1.0], "two.safetensors": [2.0]}
    assert SafetensorsCheckpoint(tmp_path).read("a").tolist() == wanted[file]


def test_an_index_with_a_byte_order_mark_is_read(tmp_path):
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "one.safetensors")
    content = json.dumps({"weight_map": {"a": "one.safetensors"}})
    (tmp_path / INDEX).write_text(content, encoding="utf-8-sig")
    assert [*SafetensorsCheckpoint(tmp_path).weights] == ["a"]


def test_a_file_without_tensors_is_named(tmp_path):
    save_file({}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="model.safetensors contain no tensors"):
        SafetensorsCheckpoint(tmp_path)


def test_a_pointer_of_git_lfs_is_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 1234\n"
    (tmp_path / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match="is a Git LFS pointer.*git lfs pull"):
        SafetensorsCheckpoint(tmp_path)


def test_a_link_without_a_target_is_named(tmp_path):
    (tmp_path / "model.safetensors").symlink_to("../blobs/4d7a")
    with pytest.raises(
        CheckpointNotFoundError, match=r"is a link to \.\./blobs/4d7a, which does not"
    ):
        SafetensorsCheckpoint(tmp_path)


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save_file({"a": np.zeros(1, np.float32)}, path)

    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("models.loading.safetensors_reader.safe_open", refuse)
    with pytest.raises(
        CheckpointError, match="model.safetensors cannot be read: Permission denied"
    ):
        SafetensorsCheckpoint(tmp_path)


def test_an_adapter_is_named(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="contains a LoRA adapter.*merge_and_unload"):
        SafetensorsCheckpoint(tmp_path)


def test_weights_in_other_formats_are_listed(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match="it contains pytorch_model.bin. Weights in"):
        SafetensorsCheckpoint(tmp_path)


def test_the_main_dtype_is_that_of_most_numbers(tmp_path):
    weights = {"matrix": np.zeros((4, 4), ml_dtypes.bfloat16)}
    weights |= {f"norm{idx}": np.zeros(4, np.float32) for idx in range(3)}
    save_file(weights, tmp_path / "model.safetensors")
    assert SafetensorsCheckpoint(tmp_path).main_dtype == "bfloat16"
