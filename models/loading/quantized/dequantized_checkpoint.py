"""`DequantizedCheckpoint`: a quantized checkpoint that reads like one that is not quantized."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np

from models.config.model_config import ModelDtype
from models.errors import CheckpointError, WeightMismatchError
from models.loading.quantized.packed_integers import ScaledIntegers
from models.loading.quantized.quantization_fields import FIELD
from models.loading.quantized.stored_parts import StoredParts
from models.loading.quantized.weight_format import WeightFormat
from models.loading.safetensors_reader import SafetensorsCheckpoint, StoredWeight

# Scales and zero points of activations and of the KV cache.
_OF_ACTIVATIONS = re.compile(
    r"[._]((?:input|output|activation|[qkv]|kv|kv_cache|prob)_(?:global_)?(?:scale|zero_point))$"
)
# Dtypes of tensors that are quantized even if no scale is stored with them.
_QUANTIZED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_STORED_DTYPES: dict[ModelDtype, str] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}

logger = logging.getLogger(__name__)


class DequantizedCheckpoint:
    """Implements `Checkpoint`. A quantized weight is dequantized when it is read.

    The other tensors are as in the files. Scales of activations and of the KV cache are left out.
    """

    def __init__(
        self, stored: SafetensorsCheckpoint, weight_format: WeightFormat, *, dtype: ModelDtype
    ) -> None:
        """Finds and checks the tensors of all quantized weights, without reading them.

        Args:
            stored: The files. Their weights must have the names that they have in the files.
            dtype: Of dequantized weights.

        Raises:
            WeightMismatchError: A tensor of a quantized weight is missing, or has another dtype or
                shape than config.json says.
            UnsupportedModelError: config.json does not say how a weight is quantized.
        """
        self.folder: Path = stored.folder
        self._stored = stored
        self._format = weight_format
        self._dtype: ModelDtype = dtype
        self._parts: dict[str, StoredParts] = {}  # by the names of plain weights
        tensors = _without_scales_of_activations(stored)
        self.weights: dict[str, StoredWeight] = dict(tensors)
        for parts in _find_quantized(tensors, weight_format):
            self._replace(parts)

    def rename(self, names: Mapping[str, str]) -> None:
        """See `Checkpoint.rename`."""
        self.weights = {names[name]: weight for name, weight in self.weights.items()}

    def read(self, name: str) -> np.ndarray:
        """See `Checkpoint.read`."""
        plain = self.weights[name]
        parts = self._parts.get(plain.name)
        if parts is None:
            return self._stored.read(plain.name)
        arrays = {
            ending: self._stored.read(tensor.name) for ending, tensor in parts.tensors.items()
        }
        try:
            # Numbers too large for float16 become infinite, and the loader names the weight.
            with np.errstate(over="ignore"):
                return self._format.dequantize(parts.module, arrays, np.dtype(self._dtype))
        except ValueError as error:
            raise CheckpointError(
                f"{plain.path}: weight {plain.name} cannot be dequantized: {error}. Download the "
                "checkpoint again."
            ) from error

    def release(self, name: str) -> None:
        """See `Checkpoint.release`."""
        plain = self.weights[name]
        parts = self._parts.get(plain.name)
        tensors = [plain] if parts is None else parts.tensors.values()
        for tensor in tensors:
            self._stored.release(tensor.name)

    def is_quantized(self, name: str) -> bool:
        """Whether `read` would dequantize this weight."""
        return self.weights[name].name in self._parts

    def stored_bytes(self, name: str) -> int:
        """Bytes of the tensors of a quantized weight in the files."""
        return sum(t.num_bytes for t in self._parts[self.weights[name].name].tensors.values())

    def read_integers(self, name: str) -> ScaledIntegers:
        """Returns a quantized weight as integers, or the bits of floats, with scales."""
        parts = self._parts[self.weights[name].name]
        arrays = {
            ending: self._stored.read(tensor.name) for ending, tensor in parts.tensors.items()
        }
        return self._format.read_integers(parts.module, arrays)

    def _replace(self, parts: StoredParts) -> None:
        """Replaces the tensors of one quantized weight by the plain weight."""
        numbers = next(
            parts.tensors[ending]
            for ending in self._format.number_endings
            if ending in parts.tensors
        )
        if self._format.skips(parts.module):
            raise WeightMismatchError(
                f"{numbers.path}: config.json lists {parts.module} in {FIELD} as a module that is "
                f"not quantized, and tensor {numbers.name} ({numbers.dtype}) is quantized. Use "
                "weights and config.json of the same release."
            )
        plain = StoredWeight(
            path=numbers.path,
            name=f"{parts.stem}{self._format.plain_ending}",
            shape=self._format.plain_shape(parts),
            dtype=_STORED_DTYPES[self._dtype],
        )
        for tensor in parts.tensors.values():
            del self.weights[tensor.name]
        self.weights[plain.name] = plain
        self._parts[plain.name] = parts


def _without_scales_of_activations(stored: SafetensorsCheckpoint) -> dict[str, StoredWeight]:
    found = {name: match[1] for name in stored.weights if (match := _OF_ACTIVATIONS.search(name))}
    if found:
        logger.warning(
            "%s: paxkv does not quantize activations or the KV cache as this checkpoint does, and "
            "ignores %d of its tensors: %s",
            *(stored.folder, len(found), ", ".join(sorted(set(found.values())))),
        )
    return {name: weight for name, weight in stored.weights.items() if name not in found}


def _find_quantized(
    tensors: Mapping[str, StoredWeight], weight_format: WeightFormat
) -> Iterator[StoredParts]:
    """The weights that have tensors with quantized numbers, or more tensors than one."""
    by_stem: dict[str, dict[str, StoredWeight]] = defaultdict(dict)
    for name, tensor in tensors.items():
        ending = next((e for e in weight_format.endings if name.endswith(e)), None)
        if ending is not None:
            by_stem[name.removesuffix(ending)][ending] = tensor
    for stem, parts in by_stem.items():
        plain = parts.get(weight_format.plain_ending)
        is_alone = len(parts) == 1 and plain is not None
        is_plain = is_alone and plain.dtype not in _QUANTIZED_DTYPES
        # `check_weights` names scales without numbers.
        if not is_plain and not parts.keys().isdisjoint(weight_format.number_endings):
            yield StoredParts(stem=stem, tensors=parts)
