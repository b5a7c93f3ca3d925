"""Arguments of `serve run` become settings, and mistakes are errors."""

import pytest

from paxkv.errors import ConfigError
from paxkv.ray.settings import read_settings


def test_no_arguments_are_the_defaults() -> None:
    settings = read_settings({})
    assert (settings.ray.num_replicas, settings.ray.max_replicas) == (1, None)
    # A stored response would be in one replica, and the next request may reach another.
    assert settings.server.response_store_bytes == 0


def test_arguments_are_text_as_on_a_command_line_or_values_as_in_yaml() -> None:
    text = {
        **{"model": "org/name", "max_num_seqs": "32", "enable-prefix-caching": "false"},
        **{"num_replicas": "2", "api_key": ["a", "b"]},
    }
    values = text | {"max_num_seqs": 32, "enable-prefix-caching": False, "num_replicas": 2}
    settings = read_settings(text)
    assert settings == read_settings(values)
    assert settings.engine.model.model == "org/name"
    assert settings.engine.scheduler.max_num_seqs == 32
    assert not settings.engine.cache.enable_prefix_caching
    assert settings.ray.num_replicas == 2
    assert settings.server.api_key == ("a", "b")
    overrides = read_settings({"override_generation_config": {"top_k": 5}})
    assert overrides.engine.model.override_generation_config.top_k == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_num_seq": "3"}, "did you mean --max-num-seqs"),
        ({"port": "80"}, "unknown flag --port"),
        ({"enable_admin": "true"}, "unknown flag --enable-admin"),
        ({"nnodes": "2"}, "unknown flag --nnodes"),
        ({"num_replicas": "0"}, "num_replicas must be"),
        ({"max_replicas": "1", "min_replicas": "2"}, "max_replicas must be"),
        ({"max_replicas": "2", "min_replicas": "0"}, "min_replicas must be"),
        ({"enable_prefix_caching": "perhaps"}, "must be true or false"),
        ({"accept_timeout_s": "-1"}, "above 0"),
        ({"num_gpus": "1", "tensor_parallel_size": "2"}, "more than num_gpus=1"),
    ],
)
def test_mistake_is_an_error_that_names_it(arguments: dict, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_settings(arguments)
