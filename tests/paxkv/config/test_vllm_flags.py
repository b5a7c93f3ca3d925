"""The table of vLLM's flags: its verdicts, and no duplicates."""

import re

import pytest

from paxkv.config.vllm_flags import VLLM_FLAGS, accepted_values

BY_NAME = {name: flag for flag in VLLM_FLAGS for name in flag.names}


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("--pipeline-parallel-size", "1", "neutral"),
        ("--pipeline-parallel-size", 1, "neutral"),
        ("--pipeline-parallel-size", True, "refused"),
        ("--pipeline-parallel-size", "2", "refused"),
        ("--cpu-offload-gb", "0.0", "neutral"),
        ("--cpu-offload-gb", 4, "refused"),
        ("--pooler-config", "None", "neutral"),
        ("--pooler-config", None, "neutral"),
        ("--pooler-config", "{1}", "refused"),
        ("--spec-method", None, "neutral"),
        ("--spec-method", "ngram", "refused"),
        ("--kv-transfer-config", '{"kv_connector": "c"}', "refused"),
        ("--enable-lora", False, "neutral"),
        ("--enable-lora", True, "refused"),
        ("--max-lora-rank", 16, "neutral"),
        ("--max-lora-rank", 64, "refused"),
        ("--language-model-only", True, "neutral"),
        ("--enforce-eager", True, "ignored"),
        ("--enforce-eager", False, "neutral"),
        ("--logits-processors", [], "neutral"),
        ("--logits-processors", ["a.B"], "refused"),
        ("--convert", "none", "neutral"),
        ("--convert", "classify", "refused"),
        ("--compilation-config", 3, "ignored"),
        ("--compilation-config", "{", "ignored"),
    ],
)
def test_neutral_values_are_distinguished_from_others(name, value, verdict):
    assert BY_NAME[name].verdict(value) == verdict


def test_flags_are_unique_and_reasons_are_parts_of_a_sentence():
    names = [name for flag in VLLM_FLAGS for name in flag.names]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"--?[a-zA-Z0-9-]+", name) for name in names)
    assert not [flag.reason for flag in VLLM_FLAGS if flag.reason.endswith(".")]


def test_accepted_values_are_words_of_a_command_line():
    shown = [accepted_values(BY_NAME[name]) for name in ("--enable-lora", "--pooler-config")]
    assert shown == [["off"], ["{}"]]
    assert accepted_values(BY_NAME["--worker-extension-cls"]) == ['""']
