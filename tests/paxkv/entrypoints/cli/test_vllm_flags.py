"""Each flag of the table is read with as many values as vLLM gives it, and has its fate."""

import argparse

import pytest

from paxkv.config.vllm_flags import VLLM_FLAGS
from paxkv.entrypoints.cli.vllm_flags import add_vllm_flags, drain_warnings


def run(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_vllm_flags(parser)
    namespace = parser.parse_args(words)
    warnings = drain_warnings(namespace, parser)
    assert vars(namespace) == {}
    return warnings


@pytest.mark.parametrize("flag", VLLM_FLAGS, ids=lambda flag: flag.names[0])
def test_flag_is_ignored_or_accepted_or_refused(flag, capsys):
    values = {0: [], 1: ["no-such-value"], "?": [], "+": ["no-such", "value"]}[flag.num_values]
    is_on_neutral = flag.num_values == 0 and True in flag.neutral
    for name in flag.names:
        if is_on_neutral:
            assert run(name) == []
        elif flag.is_refused:
            with pytest.raises(SystemExit):
                run(name, *values)
            assert f"{name} is not supported here: {flag.reason}" in capsys.readouterr().err
        else:
            assert run(name, *values) == [f"{name} has no effect: {flag.reason}."]
        if flag.num_values == 0 and False in flag.neutral and name.startswith("--"):
            assert run(name.replace("--", "--no-", 1)) == []


def test_values_that_change_nothing_are_accepted_in_silence():
    words = ["-tp=1", "--cpu-offload-gb", "0", "--kv-transfer-config={}", "--worker-cls", "auto"]
    assert run(*words, "--no-enforce-eager", "--tokenizer-mode", "hf") == []


def test_refusal_names_what_is_accepted(capsys):
    with pytest.raises(SystemExit):
        run("--runner", "pooling")
    assert "got 'pooling'; expected auto or generate." in capsys.readouterr().err


def test_flag_that_the_parser_has_is_its_own():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--swap-space", type=int)
    add_vllm_flags(parser)
    namespace = parser.parse_args(["--swap-space", "4"])
    assert (namespace.swap_space, drain_warnings(namespace, parser)) == (4, [])


def test_help_does_not_show_them():
    parser = argparse.ArgumentParser()
    add_vllm_flags(parser)
    assert "--swap-space" not in parser.format_help()
