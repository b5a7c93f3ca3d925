"""Settings of the model that cannot work are refused, and the hub's token is not shown."""

import pytest

from paxkv.config.model_config import ModelConfig
from paxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ModelConfig(dtype="int3"), "float32"),
        (lambda: ModelConfig(max_model_len=1), "max_model_len"),
        (lambda: ModelConfig(served_model_name="a"), "served_model_name must be a list"),
        (lambda: ModelConfig(served_model_name=("a", "")), "served_model_name must be a list"),
        (lambda: ModelConfig(served_model_name=("a", "b")), "no model is named"),
        (lambda: ModelConfig(generation_config=""), "generation_config must be auto"),
        (lambda: ModelConfig(model_impl="vllm"), "auto, module:Class .*, got 'vllm'"),
        (lambda: ModelConfig(model_impl="transformers"), "there are no other implementations"),
        (lambda: ModelConfig(model_impl="my_model:"), "my_model:MyModel.*, got 'my_model:'"),
        (lambda: ModelConfig(model_impl=":MyModel"), "model_impl must be"),
        (lambda: ModelConfig(model_impl=7), "model_impl must be"),
        (lambda: ModelConfig(seed=2**63), "seed"),
        (lambda: ModelConfig(seed="lucky"), "seed"),
    ],
)
def test_the_error_names_the_invalid_setting(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize(
    ("token", "got"),
    [
        ("", "an empty string"),
        (False, "a value of type bool"),
        (["hf_geheim"], "a value of type list"),
    ],
)
def test_hub_token_must_be_a_string_and_is_never_shown(token, got):
    with pytest.raises(
        ConfigError, match=f"must be a string, an access token .* got {got}"
    ) as error:
        ModelConfig(hf_token=token)
    assert "hf_geheim" not in str(error.value)
    config = ModelConfig(hf_token="hf_geheim")
    assert config.hf_token == "hf_geheim" and "hf_geheim" not in repr(config)
