"""Reads weights from a folder, array by array: one safetensors file or several."""

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

import numpy as np
from safetensors import SafetensorError, safe_open

from models.config.model_config import ModelDtype
from models.errors import CheckpointError, CheckpointNotFoundError, ModelConfigError
from models.loading.json_file import describe_missing, is_lfs_pointer, read_json_object
from models.loading.mapped_tensors import MappedTensors

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# "model-00002-of-00005.safetensors"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
_MODEL_DTYPES: dict[str, ModelDtype] = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F64": "float32",
}
_MAX_LISTED = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeight:
    """Where a weight is stored, and what the file's header says about it."""

    path: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: "F32", "BF16"

    @property
    def num_bytes(self) -> int:
        """Bytes in the file. The first number in a name of safetensors is the bits of a number."""
        bits = re.search(r"\d+", self.dtype)
        return math.prod(self.shape) * (8 if bits is None else int(bits[0])) // 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """The weight files of a folder.

    Args:
        of_weights: Name of a weight -> file that the index names for it. Empty without an index.
    """

    paths: list[Path]
    of_weights: Mapping[str, Path] = field(default_factory=dict)


class SafetensorsCheckpoint:
    """The weights of one folder. Headers are read on construction, data on `read`."""

    def __init__(self, folder: Path, *, single_file: str | None = None) -> None:
        """Opens every file once and lists its weights.

        Args:
            single_file: The name of the only file, if there is no index of its name; None finds the
                files by their usual names.

        Raises:
            CheckpointNotFoundError: There are no weight files, or a file is missing.
            CheckpointError: A file is truncated or not safetensors, the files hold no weight, or
                the index is malformed or names a file outside of the folder.
        """
        self.folder = folder
        self.weights: dict[str, StoredWeight] = {}
        self._mapped: dict[Path, MappedTensors] = {}
        files = _find_files(folder) if single_file is None else _one_file(folder / single_file)
        for path in files.paths:
            for name, weight in _read_header(path).items():
                if files.of_weights.get(name, path) == path or name not in self.weights:
                    self.weights[name] = weight
        if not self.weights:
            raise CheckpointError(
                f"{folder}: {_listed([path.name for path in files.paths])} contain no tensors, "
                "only a header. Save the model again, and save its state dict."
            )

    @property
    def main_dtype(self) -> ModelDtype:
        """The dtype of most numbers in the checkpoint; float32 for float64.

        Numbers that are no floats of 16 bits or more do not count: they are quantized.
        """
        sizes: Counter[ModelDtype] = Counter(float32=0)
        for weight in self.weights.values():
            if weight.dtype in _MODEL_DTYPES:
                sizes[_MODEL_DTYPES[weight.dtype]] += math.prod(weight.shape)
        ((dtype, _),) = sizes.most_common(1)
        return dtype

    @property
    def num_bytes(self) -> int:
        """Of all files that hold weights."""
        return sum(path.stat().st_size for path in {w.path for w in self.weights.values()})

    def rename(self, names: Mapping[str, str]) -> None:
        """Changes the keys of `weights`.

        Args:
            names: Name of every weight -> its new name. The new names must differ.
        """
        self.weights = {names[name]: weight for name, weight in self.weights.items()}

    def read(self, name: str) -> np.ndarray:
        """Returns one weight, a view of its file, with bfloat16 as `ml_dtypes.bfloat16`."""
        weight = self.weights[name]
        # Several threads read; two of them may both open a file, and one object is used.
        if weight.path not in self._mapped:
            self._mapped.setdefault(weight.path, MappedTensors(weight.path))
        return self._mapped[weight.path].read(weight.name)

    def release(self, name: str) -> None:
        """See `Checkpoint.release`."""
        weight = self.weights[name]
        if weight.path in self._mapped:
            self._mapped[weight.path].release(weight.name)


def _find_files(folder: Path) -> _Files:
    single_path, index_path = folder / SINGLE_FILE, folder / INDEX_FILE
    shards = {path: match for path in folder.iterdir() if (match := _SHARD.fullmatch(path.name))}
    if single_path.is_file():
        if shards:
            logger.warning(
                "%s has %s and also %s. paxkv reads %s, as transformers does. Delete the files "
                "that are out of date.",
                *(folder, SINGLE_FILE, _listed(sorted(path.name for path in shards)), SINGLE_FILE),
            )
        return _Files(paths=[single_path])
    if index_path.is_file():
        return _read_index(index_path)
    if not shards:
        raise _no_files(folder)
    numbers = {(int(match[1]), int(match[2])) for match in shards.values()}
    num_shards = max(total for _, total in numbers)
    if absent := {(number, num_shards) for number in range(1, num_shards + 1)} - numbers:
        raise CheckpointNotFoundError(
            f"{folder} has no {INDEX_FILE}, and {len(absent)} of the {num_shards} weight files are "
            f"missing: {_listed([str(number) for number, _ in sorted(absent)])}. Download them and "
            "the index."
        )
    return _Files(
        paths=sorted(path for path, match in shards.items() if int(match[2]) == num_shards)
    )


def _one_file(path: Path) -> _Files:
    if not path.is_file():
        index_path = path.with_name(f"{path.name}.index.json")
        if index_path.is_file():
            return _read_index(index_path)
        raise CheckpointNotFoundError(f"{describe_missing(path)} Download it.")
    return _Files(paths=[path])


def _no_files(folder: Path) -> CheckpointNotFoundError:
    for name in (SINGLE_FILE, INDEX_FILE):
        if (folder / name).is_symlink():
            return CheckpointNotFoundError(describe_missing(folder / name))
    if (folder / "adapter_config.json").is_file():
        return CheckpointNotFoundError(
            f"{folder} contains a LoRA adapter (adapter_config.json) and no weights of a model. "
            "LoRA adapters are not supported. Merge the adapter into its base model "
            "(`merge_and_unload()` in PEFT), save the result, and load that folder."
        )
    found = sorted(path.name for path in folder.iterdir())
    return CheckpointNotFoundError(
        f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; it contains {_listed(found)}. "
        "Weights in other formats (*.bin, *.pth) are not read: use the safetensors release "
        "of the model, or load_format='dummy' for random weights."
    )


def _read_index(index_path: Path) -> _Files:
    folder = index_path.parent
    try:
        weight_map = read_json_object(index_path).get("weight_map")
    except ModelConfigError as error:
        raise CheckpointError(str(error)) from error
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or any(not isinstance(name, str) for name in weight_map.values())
    ):
        raise CheckpointError(
            f"{index_path} is not a safetensors index: weight_map is {weight_map!r:.100}; expected "
            "an object that maps names of weights to names of files. Download the index again."
        )
    names = sorted(set(weight_map.values()))
    if outside := [name for name in names if _leads_outside(name)]:
        raise CheckpointError(
            f"{index_path} names files outside its folder: {_listed(map(repr, outside))}. "
            "The files must be in the folder of the index. Files elsewhere are not read: use a "
            "checkpoint from a source that you trust."
        )
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise CheckpointNotFoundError(
            f"{index_path} names {len(names)} files, of which {len(absent)} are missing: "
            f"{_listed(absent)}. Download them again."
        )
    return _Files(
        paths=[folder / name for name in names],
        of_weights={weight: folder / name for weight, name in weight_map.items()},
    )


def _leads_outside(name: str) -> bool:
    # Only the name counts: in the Hub's cache, the files are links to another folder.
    path = PurePath(name)
    return path.is_absolute() or ".." in path.parts


def _read_header(path: Path) -> dict[str, StoredWeight]:
    try:
        if is_lfs_pointer(path):
            raise CheckpointError(
                f"{path} is a Git LFS pointer; the weights themselves were not downloaded. Run "
                "`git lfs pull` in the folder."
            )
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}
            return {
                name: StoredWeight(
                    path=path, name=name, shape=tuple(weight.get_shape()), dtype=weight.get_dtype()
                )
                for name, weight in slices.items()
            }
    except PermissionError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error.strerror}. Change the file's permissions, or run paxkv "
            "as a user who may read it."
        ) from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or not a safetensors file ({error}); it has "
            f"{path.stat().st_size:,} bytes. Download it again."
        ) from error


def _listed(names: Collection[str]) -> str:
    """The first `_MAX_LISTED` names, and the number of the others."""
    names = list(names)
    rest = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + rest
