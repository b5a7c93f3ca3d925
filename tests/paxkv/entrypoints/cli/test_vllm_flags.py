"""Each flag of the table is read with as many values as vLLM gives it, and has its fate."""

import argparse
import re

import pytest

from paxkv.entrypoints.cli.vllm_flags import VLLM_FLAGS, add_vllm_flags, take_warnings


def run(*words):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_vllm_flags(parser)
    namespace = parser.parse_args(words)
    warnings = take_warnings(namespace, parser)
    assert vars(namespace) == {}
    return warnings


@pytest.mark.parametrize("flag", VLLM_FLAGS, ids=lambda flag: flag.names[0])
def test_flag_is_passed_over_or_taken_or_refused(flag, capsys):
    num_values = 2 if flag.num_values == "+" else flag.num_values
    for name in flag.names:
        words = [name, *["x"] * num_values]
        if flag.accepted is None:
            assert run(*words) == [f"{name} has no effect: {flag.reason}."]
            continue
        for value in flag.accepted:
            assert run(name, value) == run(f"{name}={value}") == []
        with pytest.raises(SystemExit):
            run(*words)
        assert f"{name} is not supported here: {flag.reason}" in capsys.readouterr().err


def test_a_switch_may_be_turned_off_too():
    assert run("--no-enforce-eager")[0].startswith("--no-enforce-eager has no effect")


def test_no_flag_is_named_twice_and_every_reason_is_half_a_sentence():
    names = [name for flag in VLLM_FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"--?[a-z0-9-]+", name) for name in names)
    assert not [flag.reason for flag in VLLM_FLAGS if flag.reason.endswith(".")]


def test_flag_that_the_parser_has_is_its_own():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--swap-space", type=int)
    add_vllm_flags(parser)
    namespace = parser.parse_args(["--swap-space", "4"])
    assert (namespace.swap_space, take_warnings(namespace, parser)) == (4, [])


def test_help_does_not_show_them():
    parser = argparse.ArgumentParser()
    add_vllm_flags(parser)
    assert "--swap-space" not in parser.format_help()
