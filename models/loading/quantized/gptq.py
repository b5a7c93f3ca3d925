"""Weights of 2, 4 or 8-bit integers that GPTQ packed along their inputs: `quant_method` gptq."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from models.errors import UnsupportedModelError
from models.loading.quantized.awq import read_group_size
from models.loading.quantized.packed_integers import ScaledIntegers, num_groups, unpack_words
from models.loading.quantized.quantization_fields import (
    FIELD,
    SkippedModules,
    as_object,
    read_choice,
    read_names,
)
from models.loading.quantized.stored_parts import FLOATS, StoredParts

# `checkpoint_format` -> what is added to the stored zero points.
_ADDED_TO_ZEROS = {"gptq": 1, "gptq_v2": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gptq:
    """Implements `WeightFormat`.

    `g_idx` names the group of each input. With activation order, groups are not of neighbors.

    Args:
        group_size: Inputs that share a scale and a zero point. None: all inputs.
        added_to_zeros: What a zero point has more than the number that is stored for it.
    """

    num_bits: int
    group_size: int | None
    added_to_zeros: int
    skipped: SkippedModules
    endings: tuple[str, ...] = (".qweight", ".qzeros", ".scales", ".g_idx")
    number_endings: tuple[str, ...] = (".qweight",)
    plain_ending: str = ".weight"

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "Gptq":
        """Reads `quantization_config`.

        Raises:
            ModelConfigError: A field is of the wrong type.
            UnsupportedModelError: The layout is another one, or numbers have other bits.
        """
        name = "format" if fields.get("checkpoint_format") is None else "checkpoint_format"
        layout = read_choice(f"{FIELD}.{name}", fields.get(name) or "gptq", [*_ADDED_TO_ZEROS])
        overridden = [
            module
            for module in as_object(fields.get("dynamic") or {}, f"{FIELD}.dynamic")
            if not module.startswith("-:")
        ]
        if overridden:
            raise UnsupportedModelError(
                f"config.json: {FIELD}.dynamic has other settings for {overridden[0]!r}; paxkv "
                "supports one setting for all modules, and '-:' for modules that are not "
                "quantized. Use another release of this model."
            )
        return cls(
            num_bits=read_choice(f"{FIELD}.bits", fields.get("bits"), (2, 4, 8)),
            group_size=read_group_size(fields, "group_size"),
            added_to_zeros=_ADDED_TO_ZEROS[layout],
            skipped=SkippedModules(read_names(fields, "modules_to_not_convert")),
        )

    def skips(self, module: str) -> bool:
        """See `WeightFormat.skips`."""
        return module in self.skipped

    def plain_shape(self, parts: StoredParts) -> tuple[int, ...]:
        """See `WeightFormat.plain_shape`."""
        num_words, out_features = parts.require(".qweight", ["I32"], num_axes=(2,)).shape
        in_features = num_words * 32 // self.num_bits
        groups = num_groups(in_features, self.group_size)
        parts.require(".qzeros", ["I32"])
        parts.check_shape(".qzeros", (groups, out_features * self.num_bits // 32))
        parts.require(".scales", FLOATS)
        parts.check_shape(".scales", (groups, out_features))
        if ".g_idx" in parts.tensors:
            parts.require(".g_idx", ["I32", "I64"])
            parts.check_shape(".g_idx", (in_features,))
        return out_features, in_features

    def read_integers(self, module: str, arrays: Mapping[str, np.ndarray]) -> ScaledIntegers:
        """See `WeightFormat.read_integers`."""
        zeros = unpack_words(arrays[".qzeros"], self.num_bits).T.astype(np.int32)
        return ScaledIntegers(
            numbers=unpack_words(arrays[".qweight"].T, self.num_bits),
            scales=arrays[".scales"].T,
            zeros=zeros + self.added_to_zeros,
            group_size=self.group_size,
            group_idx=arrays.get(".g_idx"),
        )

    def dequantize(
        self, module: str, arrays: Mapping[str, np.ndarray], dtype: np.dtype
    ) -> np.ndarray:
        """See `WeightFormat.dequantize`."""
        return self.read_integers(module, arrays).dequantize().astype(dtype, copy=False)
