"""Prompts from flags or stdin are completed in order, as text or as JSON."""

import io
import json

import pytest

from paxkv.entrypoints.cli import generate
from tests.paxkv.fake_build import fake_model_parts, save_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}|{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command with an engine that echoes its prompts; returns exit code and output."""
    fake_model_parts(monkeypatch)
    save_tokenizer(tmp_path, chat_template=TEMPLATE)

    def call(*words, text=""):
        monkeypatch.setattr(generate.sys, "stdin", io.StringIO(text))
        code = generate.main([str(tmp_path), *words])
        captured = capsys.readouterr()
        return code, captured.out.splitlines(), captured.err

    return call


def test_prompts_are_completed_in_order(run):
    # The engine samples <s> first, which has no text.
    words = ("--prompt", "abc", "--prompt", "xyz", "--max-tokens", "4", "--temperature", "0")
    assert run(*words)[:2] == (0, ["abc", "xyz"])
    assert run("--max-tokens", "3", text="abc\n\nxyz\n")[:2] == (0, ["ab", "xy"])


def test_json_contains_every_completion(run):
    code, lines, _ = run("--prompt", "abc", "--max-tokens", "4", "--json", "--n", "2", "--seed=5")
    assert code == 0
    (row,) = map(json.loads, lines)
    completion = {"text": "abc", "finish_reason": "length", "num_tokens": 4}
    assert row == {"prompt": "abc", "completions": [completion] * 2}


def test_unset_flags_use_the_models_defaults(run, tmp_path):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 3, "temperature": 0}')
    assert run("--prompt", "abcdef")[1] == ["ab"]
    assert run("--prompt", "abcdef", "--max-tokens", "5")[1] == ["abcd"]
    override = '{"max_new_tokens": 4}'
    assert run("--prompt", "abcdef", "--override-generation-config", override)[1] == ["abc"]
    # The engine samples <s> first, and then repeats the prompt.
    assert len(run("--prompt", "abcdef", "--generation-config", "vllm")[1][0]) > 8
    assert "temperature=0" in run("--prompt", "a", "--n", "2")[2]


@pytest.mark.parametrize("chat", [(), ("--chat",)], ids=["text", "chat"])
def test_only_the_models_default_max_tokens_is_lowered_to_what_fits(run, tmp_path, chat):
    (tmp_path / "generation_config.json").write_text('{"max_new_tokens": 60}')
    # Two blocks of 16, for at most 33 tokens.
    words = (*chat, "--prompt", "a" * 20, "--num-gpu-blocks-override", "3", "--json")
    code, lines, _ = run(*words, "--max-model-len", "64", "--temperature", "0")
    (completion,) = json.loads(*lines)["completions"]
    num_prompt_tokens = 22 if chat else 21
    assert (code, completion["num_tokens"]) == (0, 33 - num_prompt_tokens)
    code, _, complaint = run(*words, "--max-model-len", "64", "--max-tokens", "60")
    assert code == 1 and "Ask for at most" in complaint


def test_chat_renders_the_prompt_with_the_template(run):
    words = ("--chat", "--prompt", "ab", "--system-prompt", "s", "--max-tokens", "6")
    assert run(*words)[1] == ["s|ab|>"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "no prompt"),
        (("--prompt", "a", "--temperature", "-1"), "temperature"),
        (("--prompt", "a", "--block-size", "7"), "block_size"),
        (("--prompt", "a" * 500), "501 tokens"),
        (("--prompt", "a", "--system-prompt", "s"), "--system-prompt needs --chat"),
    ],
)
def test_error_is_one_line_with_exit_code_1(run, words, complaint):
    code, lines, errors = run(*words)
    assert (code, lines) == (1, [])
    assert errors.startswith("paxkv: error: ") and errors.count("\n") == 1
    assert complaint in errors


def test_engine_flags_reach_the_engine(run, monkeypatch):
    seen = {}

    class SpyLLM(generate.LLM):
        def __init__(self, **arguments):
            seen.update(arguments)
            super().__init__(**arguments)

    monkeypatch.setattr(generate, "LLM", SpyLLM)
    code, _, _ = run("--prompt", "a", "--policy", "priority", "--max-num-seqs", "3", "--seed", "9")
    assert code == 0
    assert (seen["scheduling_policy"], seen["max_num_seqs"], seen["seed"]) == ("priority", 3, 9)
