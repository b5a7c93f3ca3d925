"""Settings of the runner that cannot work are refused, with what is allowed."""

import pytest

from paxkv.config.runner_config import RunnerConfig
from paxkv.errors import ConfigError


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: RunnerConfig(kernels="triton"), "kernels must be one of auto, xla"),
        (lambda: RunnerConfig(enable_compilation_cache=1), "enable_compilation_cache must be"),
        (
            lambda: RunnerConfig(enable_compilation_cache=False, compilation_cache_dir="a"),
            "compilation_cache_dir='a' is set, but",
        ),
        (
            lambda: RunnerConfig(compiled_dir="a", compilation_cache_dir="b"),
            "compiled_dir='a' and compilation_cache_dir='b' are both set",
        ),
    ],
)
def test_the_error_names_the_invalid_setting(make, word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        make()


@pytest.mark.parametrize("window_s", [0, -1.0, 3601, "some", True, float("nan")])
def test_expert_load_window_must_be_a_positive_number_of_seconds(window_s: object) -> None:
    with pytest.raises(ConfigError, match="expert_load_window must be a number of seconds"):
        RunnerConfig(expert_load_window=window_s)
