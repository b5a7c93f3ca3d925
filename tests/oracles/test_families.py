"""Which of the reference families' configurations load, and that the others are refused by name."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import read_config
from models.errors import UnsupportedModelError
from tests.oracles import families
from tests.oracles.more_families import MORE

DECODERS = families.FAMILIES | families.EXTRA | families.NEWEST
# README.md's table of models names the same.
LOADED = [
    "llama",
    "qwen3",
    "gemma3",
    "mistral-window",
    "olmo2",
    "phi3",
    "glm4",
    "qwen3-moe",
    "mixtral",
    "gpt-oss",
    "llama4",
    "qwen2",
    "gemma2",
    "gemma4-dense",
    "gemma4-ple",
    "gemma4-moe",
    "gemma3n",
    "ministral3",
    "phi3-longrope",
    "llama3-rope",
    "cohere",
    "cohere2",
    "granite",
    "granite-swa",
    "exaone4",
    "olmo3",
    "seed-oss",
    "smollm3",
    "hunyuan-dense",
    "ernie4.5",
    "apertus",
    "arcee",
    "nemotron",
    "starcoder2",
    "jais2",
    "cwm",
    "hyperclovax",
    "qwen2-moe",
    "glm4-moe",
    "minimax-m2",
    "mimo-v2-flash",
    "olmoe",
    "glm",
    "phi",
    "stablelm",
    "olmo",
    "helium",
    "vaultgemma",
    "gemma",
    "nanochat",
    "stablelm-2",
    "ministral3-far",
    "olmo-clipped",
    "phi-normed",
    "hyperclovax-prenorm",
    "mimo-v2-flash-dense",
    "iquestcoder",
    "internlm3",
]
# transformers saves these with the architecture of another family in config.json, and with other
# names of tensors. The loader refuses the tensors.
UNDER_ANOTHER_NAME = ("exaone3", "sarvam-moe")


def test_decoder_configurations_load_or_are_refused_with_the_architecture_named():
    assert len(DECODERS) == 136 + len(MORE)
    loaded = []
    for name, make_config in DECODERS.items():
        config = make_config()
        config.architectures = [families.model_class(config).__name__]
        hf_config = json.loads(config.to_json_string(use_diff=False))
        try:
            read_config(hf_config)
        except UnsupportedModelError as error:
            assert config.architectures[0] in str(error), name
        else:
            loaded.append(name)
    assert [name for name in loaded if name not in UNDER_ANOTHER_NAME] == LOADED
