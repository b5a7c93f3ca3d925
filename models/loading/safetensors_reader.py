"""Reads weights from a folder, array by array: one safetensors file or an index of many."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np
from safetensors import SafetensorError, safe_open

from models.errors import CheckpointError, CheckpointNotFoundError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """Where a weight lies and what its header says of it."""

    path: Path
    shape: tuple[int, ...]
    dtype: str  # safetensors' own name: "F32", "BF16"


class SafetensorsCheckpoint:
    """The weights of one folder. Headers are read on construction, data on `read`."""

    def __init__(self, folder: Path) -> None:
        """Opens every file once and lists its weights.

        Raises:
            CheckpointNotFoundError: There are no weight files, or the index names one that is
            missing.
            CheckpointError: A file is truncated or not safetensors, or the index is malformed or
            names a file outside the folder.
        """
        self.folder = folder
        self.weights: dict[str, StoredWeight] = {}
        for path in _list_files(folder):
            self.weights.update(_read_header(path))

    def read(self, name: str) -> np.ndarray:
        """Returns one weight, with bfloat16 as `ml_dtypes.bfloat16`."""
        with safe_open(self.weights[name].path, framework="numpy") as file:
            return file.get_tensor(name)


def _list_files(folder: Path) -> list[Path]:
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE]
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        raise CheckpointNotFoundError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; got "
            f"{sorted(path.name for path in folder.iterdir())[:10]}. Weights in other formats "
            "(*.bin, *.pth, *.gguf) are not read: use the safetensors release of the model, or "
            "load_format='dummy' for random weights."
        )
    try:
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
        files = [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{index_path} is not a safetensors index ({type(error).__name__}: {error}); wanted an "
            "object with a weight_map of file names. Download it again."
        ) from error
    outside = [name for name in names if _leads_outside(name)]
    if outside:
        raise CheckpointError(
            f"{index_path} names files outside its folder: {', '.join(map(repr, outside[:10]))}. "
            "Wanted names of files in the folder. Files from elsewhere are not read: get the "
            "checkpoint from a source that you trust."
        )
    absent = [path.name for path in files if not path.is_file()]
    if absent:
        raise CheckpointNotFoundError(
            f"{index_path} names {len(files)} files, of which {len(absent)} are missing: "
            f"{', '.join(absent[:10])}. Download them again."
        )
    return files


def _leads_outside(name: str) -> bool:
    # The name alone: in the Hub's cache the files themselves are links to another folder.
    path = PurePath(name)
    return path.is_absolute() or ".." in path.parts


def _read_header(path: Path) -> dict[str, StoredWeight]:
    try:
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: StoredWeight(
                    path=path, shape=tuple(weight.get_shape()), dtype=weight.get_dtype()
                )
                for name, weight in slices.items()
            }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}); it has "
            f"{path.stat().st_size:,} bytes. Download it again."
        ) from error
