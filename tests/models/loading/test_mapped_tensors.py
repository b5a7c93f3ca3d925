"""Tensors are views of the mapped file, equal to what safetensors reads."""

import json
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import CheckpointError
from models.loading.mapped_tensors import MappedTensors
from models.loading.safetensors_reader import SafetensorsCheckpoint
from tests.models.loading.quantized.stored import save_tensors


def test_every_dtype_and_shape_is_what_safetensors_reads(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {
        f"{dtype.__name__}.{len(shape)}": rng.normal(size=shape).astype(dtype)
        for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16)
        for shape in ((), (5,), (3, 7), (2, 0), (2, 3, 4))
    }
    save_file(tensors, tmp_path / "file")
    wanted, file = load_file(tmp_path / "file"), MappedTensors(tmp_path / "file")
    for name, tensor_np in wanted.items():
        got = file.read(name)
        assert (got.dtype, got.shape) == (tensor_np.dtype, tensor_np.shape), name
        np.testing.assert_array_equal(got, tensor_np)


@pytest.mark.parametrize("dtype", [ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu])
def test_8_bit_floats_are_read_from_their_own_tensor(tmp_path, dtype):
    """NumPy has no dtypes for them, so `safetensors` cannot read them."""
    one, other = np.arange(1, 7).astype(dtype).reshape(2, 3), np.array([8, 16], dtype)
    tensors = {"first": np.ones(5, np.int8), "one": one, "other": other, "empty": other[:0]}
    save_tensors(tmp_path / "model.safetensors", tensors)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name, tensor_np in tensors.items():
        got = checkpoint.read(name)
        assert got.dtype == tensor_np.dtype
        np.testing.assert_array_equal(got, tensor_np)


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    header = {"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(CheckpointError, match="weight 'a' has the dtype F4; paxkv reads F64"):
        MappedTensors(tmp_path / "file").read("a")


@pytest.mark.parametrize("padding", range(8))
def test_data_may_begin_at_any_byte(tmp_path, padding):
    values_np = np.arange(6, dtype=np.float32)
    header = {"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}
    text = json.dumps(header).encode() + b" " * padding
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text + values_np.tobytes())
    assert MappedTensors(tmp_path / "file").read("a").astype(np.float64).tolist() == [
        [0, 1, 2],
        [3, 4, 5],
    ]


def test_a_tensor_is_no_copy_and_outlives_its_file_object(tmp_path):
    save_file({"a": np.ones(4, np.float32)}, tmp_path / "file")
    file = MappedTensors(tmp_path / "file")
    first, second = file.read("a"), file.read("a")
    del file
    assert np.shares_memory(first, second) and not first.flags.writeable
    assert first.tolist() == [1.0] * 4


def test_a_file_without_numbers_is_not_mapped(tmp_path):
    save_file({"a": np.ones((0, 3), np.float16)}, tmp_path / "file")
    assert MappedTensors(tmp_path / "file").read("a").shape == (0, 3)


def resident_bytes(path) -> int:
    """Of a file that this process has mapped, as Linux counts them."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [idx for idx, line in enumerate(lines) if line.endswith(str(path))]
    sizes = [next(line for line in lines[idx:] if line.startswith("Rss:")) for idx in starts]
    return sum(1024 * int(line.split()[1]) for line in sizes)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_released_tensor_takes_no_memory_and_stays_readable(tmp_path):
    path = tmp_path / "file"
    arrays = {name: np.full(2**18, value, np.float32) for name, value in (("a", 1), ("b", 2))}
    save_file(arrays, path)
    file = MappedTensors(path)
    views = {name: file.read(name) for name in arrays}
    assert [view.sum() for view in views.values()] == [2**18, 2**19]
    assert resident_bytes(path) >= 2**21
    file.release("a")
    assert 2**20 <= resident_bytes(path) < 2**20 + 2**17
    file.release("b")
    assert resident_bytes(path) == 0
    np.testing.assert_array_equal(views["a"], arrays["a"])
