"""`GGUFCheckpoint`: the weights of a GGUF file as a checkpoint in Hugging Face layout has them."""

import importlib
import types
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from models.config.model_config import ModelDtype
from models.errors import CheckpointError, ModelError
from models.loading.gguf.gguf_config import ROPE_FACTORS, name_in_checkpoint, num_rotated_heads
from models.loading.gguf.gguf_file import read_gguf
from models.loading.halves_of_heads import halves_of_heads
from models.loading.mapped_tensors import release_pages
from models.loading.safetensors_reader import StoredWeight

_PLAIN_DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


class GGUFCheckpoint:
    """Implements `Checkpoint`. A quantized weight is widened to float32 when it is read."""

    # For a config.json without a dtype. `make_config` always sets one.
    main_dtype: ModelDtype = "bfloat16"

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            CheckpointError: As `read_gguf`; or two tensors have one name in Hugging Face layout.
            ModelError: Weights are quantized, and the package `gguf` is not installed.
        """
        self.folder = path
        self._file = read_gguf(path)
        self.weights: dict[str, StoredWeight] = {}
        for name, tensor in self._file.tensors.items():
            # `make_config` reads these factors.
            if name == ROPE_FACTORS:
                continue
            dtype = tensor.type_name if tensor.type_name in _PLAIN_DTYPES else "F32"
            own_name = name_in_checkpoint(name)
            if own_name in self.weights:
                raise CheckpointError(
                    f"{path}: two tensors have the name {own_name}. Download it again."
                )
            self.weights[own_name] = StoredWeight(
                path=path, name=name, shape=tensor.shape, dtype=dtype
            )
        type_names = {tensor.type_name for tensor in self._file.tensors.values()}
        if type_names - _PLAIN_DTYPES.keys():
            _import_gguf(path)

    @property
    def num_bytes(self) -> int:
        """The size of the file."""
        return len(self._file.data)

    def rename(self, names: Mapping[str, str]) -> None:
        """See `Checkpoint.rename`."""
        self.weights = {names[name]: weight for name, weight in self.weights.items()}

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        tensor = self._file.tensors[self.weights[name].name]
        stored_np = self._file.read_bytes(tensor.name)
        if tensor.type_name in _PLAIN_DTYPES:
            weight_np = stored_np.view(_PLAIN_DTYPES[tensor.type_name])
        else:
            quants = _import_gguf(self.folder)
            with np.errstate(all="ignore"):  # the loader names weights that are not finite
                weight_np = quants.dequantize(
                    stored_np, quants.GGMLQuantizationType[tensor.type_name]
                )
        weight_np = weight_np.reshape(tensor.shape)
        num_heads = num_rotated_heads(self._file, tensor.name)
        return weight_np if num_heads is None else halves_of_heads(weight_np, num_heads)

    def release(self, name: str) -> None:
        """See `Checkpoint.release`."""
        tensor = self._file.tensors[self.weights[name].name]
        release_pages(self._file.data, tensor.start, tensor.start + tensor.num_bytes)


def _import_gguf(path: Path) -> types.ModuleType:
    try:
        return importlib.import_module("gguf.quants")
    except ImportError as error:
        raise ModelError(
            f"{path} is quantized, which needs the package gguf ({error}). Install it: "
            "`pip install 'paxkv[gguf]'`."
        ) from error
