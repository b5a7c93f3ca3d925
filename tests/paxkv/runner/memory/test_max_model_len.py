"""A sequence may be as long as was asked for, within the scaled positions."""

import pytest

from models import read_config
from paxkv.config.model_config import FIT_MEMORY
from paxkv.errors import ConfigError
from paxkv.runner.memory.max_model_len import find_max_model_len

YARN = read_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0},
    }
)


@pytest.mark.parametrize(
    ("asked", "found"), [(None, 2048), (FIT_MEMORY, 2048), (40, 40), (2048, 2048)]
)
def test_max_model_len_is_the_setting_or_else_the_models_limit(asked, found) -> None:
    assert find_max_model_len(asked, YARN) == found


def test_more_than_the_scaled_positions_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=2049 .* 2048 positions"):
        find_max_model_len(2049, YARN)
