"""Finds the `WeightFormat` of a checkpoint in its config.json."""

from collections.abc import Callable, Mapping

from models.loading.quantized.awq import Awq
from models.loading.quantized.compressed_tensors import CompressedTensors
from models.loading.quantized.fp8 import Fp8
from models.loading.quantized.gptq import Gptq
from models.loading.quantized.mxfp4 import Mxfp4
from models.loading.quantized.quantization_fields import FIELD, find_quantization, read_choice
from models.loading.quantized.weight_format import WeightFormat

# `quant_method` -> reads the other fields of `quantization_config`.
FORMATS: dict[str, Callable[[Mapping[str, object]], WeightFormat]] = {
    "fp8": Fp8.read,
    "mxfp4": Mxfp4.read,
    "compressed-tensors": CompressedTensors.read,
    "awq": Awq.read,
    "gptq": Gptq.read,
}


def find_weight_format(hf_config: Mapping[str, object]) -> WeightFormat | None:
    """The format that config.json describes; None if the weights are not quantized.

    Raises:
        ModelConfigError: A field is missing or of the wrong type.
        UnsupportedModelError: paxkv does not read this format.
    """
    fields = find_quantization(hf_config)
    if fields is None:
        return None
    method = read_choice(f"{FIELD}.quant_method", fields.get("quant_method"), [*FORMATS])
    return FORMATS[method](fields)
