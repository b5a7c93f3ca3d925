"""`quantization_config` of config.json selects the format."""

import pytest

from models.errors import ModelConfigError, UnsupportedModelError
from models.loading.quantized.find_format import find_weight_format
from tests.models.loading.quantized.quantizers import QUANTIZERS


@pytest.mark.parametrize("quant_method", QUANTIZERS)
def test_method_selects_the_class(quant_method):
    quantization, _ = QUANTIZERS[quant_method]
    name = type(find_weight_format({"quantization_config": quantization})).__name__
    assert name.lower() == quant_method.replace("-", "")


@pytest.mark.parametrize(
    "hf_config",
    [
        {"text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
        {"compression_config": {"quant_method": "mxfp4"}},
        {"quantization_config": {"quant_method": "mxfp4"}, "text_config": None},
    ],
)
def test_places_in_config_json(hf_config):
    assert type(find_weight_format(hf_config)).__name__ == "Mxfp4"


@pytest.mark.parametrize("hf_config", [{}, {"quantization_config": None}, {"text_config": {}}])
def test_other_checkpoints_have_no_format(hf_config):
    assert find_weight_format(hf_config) is None


@pytest.mark.parametrize("quant_method", ["bitsandbytes", "modelopt", None, 4])
def test_unknown_method_is_refused_with_the_supported_ones(quant_method):
    with pytest.raises(UnsupportedModelError) as raised:
        find_weight_format({"quantization_config": {"quant_method": quant_method}})
    assert str(raised.value) == (
        f"config.json: quantization_config.quant_method is {quant_method!r}, which is not "
        "supported; paxkv supports 'fp8', 'mxfp4', 'compressed-tensors', 'awq', 'gptq'. Use "
        "another release of this model."
    )


def test_description_must_be_an_object():
    with pytest.raises(ModelConfigError, match="quantization_config is 'fp8'; expected an object"):
        find_weight_format({"quantization_config": "fp8"})
