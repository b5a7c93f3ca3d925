"""Weights of 4-bit integers that AutoAWQ packed for its GEMM kernel: `quant_method` awq."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.config.fields import read_count
from models.errors import UnsupportedModelError
from models.loading.quantized.packed_integers import ScaledIntegers, num_groups, unpack_words
from models.loading.quantized.quantization_fields import (
    FIELD,
    SkippedModules,
    read_choice,
    read_names,
    with_path,
)
from models.loading.quantized.stored_parts import FLOATS, StoredParts

_NUM_BITS = 4
_NUM_PER_WORD = 32 // _NUM_BITS
# The column of each of the eight numbers of a word, the lowest bits first.
_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)
_PLACES = np.argsort(_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Awq:
    """Implements `WeightFormat`.

    Args:
        group_size: Inputs that share a scale and a zero point. None: all inputs.
    """

    group_size: int | None
    skipped: SkippedModules
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales")
    number_endings: tuple[str, ...] = (".qweight",)
    plain_ending: str = ".weight"

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "Awq":
        """Reads `quantization_config`, which has two names for some fields.

        Raises:
            ModelConfigError: A field is of the wrong type.
            UnsupportedModelError: The layout or the number of bits is not supported.
        """
        version = str(fields.get("version") or "gemm").lower()
        read_choice(f"{FIELD}.version", version, ("gemm",))
        read_choice(f"{FIELD}.zero_point", fields.get("zero_point", True), (True,))
        bits = "w_bit" if fields.get("bits") is None else "bits"
        if fields.get(bits) != _NUM_BITS:
            raise UnsupportedModelError(
                f"config.json: {FIELD}.{bits} is {fields.get(bits)!r}; AWQ has {_NUM_BITS} bits. "
                "Use another release of this model."
            )
        size = "q_group_size" if fields.get("group_size") is None else "group_size"
        return cls(
            group_size=read_group_size(fields, size),
            skipped=SkippedModules(read_names(fields, "modules_to_not_convert")),
        )

    def skips(self, module: str) -> bool:
        """See `WeightFormat.skips`."""
        return module in self.skipped

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """See `WeightFormat.plain_shape`."""
        in_features, num_words = parts.require(".qweight", ["I32"], num_axes=(2,)).shape
        groups = num_groups(in_features, self.group_size)
        parts.require(".qzeros", ["I32"])
        parts.check_shape(".qzeros", (groups, num_words))
        parts.require(".scales", FLOATS)
        parts.check_shape(".scales", (groups, num_words * _NUM_PER_WORD))
        return num_words * _NUM_PER_WORD, in_features

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """See `WeightFormat.read_integers`."""
        return ScaledIntegers(
            numbers=_unpack_columns(arrays[".qweight"]).T,
            scales=arrays[".scales"].T,
            zeros=_unpack_columns(arrays[".qzeros"]).T,
            group_size=self.group_size,
        )

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """See `WeightFormat.dequantize`."""
        return self.read_integers(module, arrays).dequantize().astype(dtype, copy=False)


def _unpack_columns(
    words: np.ndarray,  # i32[rows, columns / 8]
) -> np.ndarray:  # u8[rows, columns]
    numbers = unpack_words(words, _NUM_BITS).reshape(-1, _NUM_PER_WORD)
    return numbers[:, _PLACES].reshape(len(words), -1)


def read_group_size(fields: Mapping[str, object], name: str) -> int | None:
    """Reads the size of groups in `quantization_config`; -1, which means all inputs, is None.

    Raises:
        ModelConfigError: It is missing or not a positive integer.
    """
    if fields.get(name) == -1:
        return None
    return read_count(with_path(fields, FIELD), f"{FIELD}.{name}")
