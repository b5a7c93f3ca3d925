"""API keys in the environment: paxkv's variable overrides vLLM's."""

import pytest

from paxkv.config.environment import API_KEY_VARIABLES, words_from_environment


@pytest.mark.parametrize(
    ("paxkv", "vllm", "keys"),
    [
        (None, None, ()),
        ("a,b", None, ("a", "b")),
        (None, " c , ,d", ("c", "d")),
        ("a", "c", ("a",)),
        ("", "c", ("c",)),
        (" , ", "c", ("c",)),
        ("", "", ()),
    ],
)
def test_the_first_variable_with_a_key_wins(monkeypatch, paxkv, vllm, keys):
    for name, value in (("PAXKV_API_KEY", paxkv), ("VLLM_API_KEY", vllm)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert words_from_environment(API_KEY_VARIABLES) == keys


def test_a_setting_without_variables_has_no_words():
    assert words_from_environment(()) == ()
