"""A model that thinks: its thoughts are what they are without a form, and the form binds the rest.

About two minutes: pytest -m slow tests/end_to_end/test_thoughts_before_forms.py
"""

import json
import re
import shutil

import openai
import pytest

from tests.end_to_end.real_server import ROOT, running_server

pytestmark = pytest.mark.slow

MODEL = "thinker"
OPEN, CLOSE, EOS = 766, 767, 2
QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
REGEX = "(yes|no)( yes| no){3}"
FORM = {"structured_outputs": {"regex": REGEX}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}},
            "required": ["a"],
            "additionalProperties": False,
        },
    },
}


def _rename_tokens(tokenizer: dict[str, object], names: dict[int, str]) -> None:
    """Renames tokens that no test needs, as added tokens are named."""
    model = tokenizer["model"]
    old_names = {name for name, token_id in model["vocab"].items() if token_id in names}
    kept = {name: i for name, i in model["vocab"].items() if name not in old_names}
    model["vocab"] = kept | {name: token_id for token_id, name in names.items()}
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in old_names]
    for token_id, name in names.items():
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
        tokenizer["added_tokens"].append({"id": token_id, "content": name, **flags})


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("thinker")
    shutil.copytree(ROOT / "models" / "demo" / "checkpoint", folder, dirs_exist_ok=True)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    _rename_tokens(tokenizer, {OPEN: "<think>", CLOSE: "</think>"})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    arguments = ("--model", str(folder), "--served-model-name", MODEL)
    small = ("--max-num-seqs", "8", "--max-num-batched-tokens", "64", "--max-model-len", "640")
    with (
        running_server(*arguments, *small, "--reasoning-parser", "deepseek_r1") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def _ask(client, seed, **fields):
    """Thoughts, content and why it ended; checked to be the same when they are streamed."""
    asked = {
        "model": MODEL,
        "messages": QUESTION,
        "max_tokens": 400,
        "temperature": 1.2,
        "seed": seed,
        # It was not made to think: so it does not answer at once, and comes to an end.
        "logit_bias": {str(CLOSE): 9, str(EOS): -100},
        **fields,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    reasoning, content, reason = "", "", None
    for chunk in client.chat.completions.create(stream=True, **asked):
        for choice in chunk.choices:
            reasoning += getattr(choice.delta, "reasoning", None) or ""
            content += choice.delta.content or ""
            reason = choice.finish_reason or reason
    message = whole.message
    found = (message.reasoning or "", message.content or "", whole.finish_reason)
    if not message.tool_calls:
        assert (reasoning, content, reason) == found
    return *found, message.tool_calls


def test_thoughts_are_free_and_the_answer_has_its_form(client):
    num_compared = 0
    for seed in range(12):
        free, content, _, _ = _ask(client, seed)
        thoughts, answer, reason, _ = _ask(client, seed, extra_body=FORM)
        assert reason == "stop" and re.fullmatch(REGEX, answer)
        if content:
            assert thoughts == free
            num_compared += len(free) > 0
    assert num_compared >= 3


def test_a_forced_call_follows_the_thoughts(client):
    choice = {"type": "function", "function": {"name": "f"}}
    thoughts, _, _, (call,) = _ask(client, 1, tools=[TOOL], tool_choice=choice)
    assert thoughts and json.loads(call.function.arguments)["a"] in (1, 2)


def test_completions_have_no_thoughts(client):
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 40, "extra_body": FORM}
    (choice,) = client.completions.create(**asked).choices
    assert re.fullmatch(REGEX, choice.text)
