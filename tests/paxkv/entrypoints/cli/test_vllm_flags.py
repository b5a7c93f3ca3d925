"""Each flag of the table accepts vLLM's number of values, and is ignored or rejected."""

import argparse
import functools

import pytest

from paxkv.config.vllm_flags import VLLM_FLAGS
from paxkv.entrypoints.cli.vllm_flags import add_vllm_flags, drain_warnings


@functools.cache
def make_parser():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_vllm_flags(parser)
    return parser


def run(*words):
    parser = make_parser()
    namespace = parser.parse_args(words)
    warnings = drain_warnings(namespace, parser)
    assert vars(namespace) == {}
    return warnings


@pytest.mark.parametrize("flag", VLLM_FLAGS, ids=lambda flag: flag.names[0])
def test_flag_is_ignored_accepted_or_rejected(flag, capsys):
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


def test_neutral_values_are_accepted_without_a_warning():
    words = ["-pp=1", "--cpu-offload-gb", "0", "--kv-transfer-config={}", "--worker-cls", "auto"]
    assert run(*words, "--no-enforce-eager", "--tokenizer-mode", "hf") == []


def test_error_names_the_accepted_values(capsys):
    with pytest.raises(SystemExit):
        run("--runner", "pooling")
    assert "got 'pooling'; expected auto or generate." in capsys.readouterr().err


def test_flag_of_the_parser_itself_is_not_replaced():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--swap-space", type=int)
    add_vllm_flags(parser)
    namespace = parser.parse_args(["--swap-space", "4"])
    assert (namespace.swap_space, drain_warnings(namespace, parser)) == (4, [])


def test_help_does_not_show_vllms_flags():
    parser = argparse.ArgumentParser()
    add_vllm_flags(parser)
    assert "--swap-space" not in parser.format_help()
