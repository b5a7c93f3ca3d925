"""Reads of single fields of a config.json."""

import pytest

from models.config_fields import with_defaults
from models.registry import read_config

HF_CONFIG = {
    "vocab_size": 16,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "num_experts": 8,
}


def test_null_is_the_default_except_of_token_ids():
    defaults = {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "bos_token_id": 1, "eos_token_id": 2}
    fields = {"rms_norm_eps": None, "eos_token_id": None, "sliding_window": None, "rope_theta": 7}
    assert with_defaults(fields, defaults) == {
        "rms_norm_eps": 1e-5,
        "rope_theta": 7,
        "bos_token_id": 1,
        "eos_token_id": None,
        "sliding_window": None,
    }


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("MixtralForCausalLM", "rope_theta"),
        ("MixtralForCausalLM", "rms_norm_eps"),
        ("MiniMaxM2ForCausalLM", "rope_theta"),
        ("OlmoeForCausalLM", "rms_norm_eps"),
        ("Glm4MoeForCausalLM", "rms_norm_eps"),
    ],
)
def test_a_null_number_is_the_default_of_its_family(architecture, name):
    hf_config = HF_CONFIG | {"architectures": [architecture]}
    assert read_config(hf_config | {name: None}) == read_config(hf_config)
