"""Tests of the shipped demo checkpoint: its files, its size, its tokenizer, and what it answers."""

import json
from pathlib import Path
from random import Random

import jax
import numpy as np
import pytest
from flax import nnx
from jinja2.sandbox import ImmutableSandboxedEnvironment
from safetensors import safe_open
from tokenizers import Tokenizer

import models.demo
from models.demo.checkpoint import checkpoint_weights, load_checkpoint, save_checkpoint
from models.demo.data import Conversation, addition_turn, sample_conversation
from models.demo.evaluate import held_out_pairs, num_exact_answers
from models.demo.generation import generate_greedy, render_question
from models.demo.packing import encode_conversations
from models.demo.system_prompts import long_system_prompt
from models.demo.tokenizer_training import CHAT_TEMPLATE
from models.demo.training_model import DemoModel, DemoModelConfig

CHECKPOINT = Path(models.demo.__file__).parent / "checkpoint"


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def template():
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    return ImmutableSandboxedEnvironment().from_string(config["chat_template"])


@pytest.fixture(scope="module")
def model():
    return load_checkpoint(CHECKPOINT)[0]


def test_all_standard_files_are_there_and_small():
    names = {path.name for path in CHECKPOINT.iterdir()}
    assert names >= {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "README.md",
    }
    assert sum(path.stat().st_size for path in CHECKPOINT.iterdir()) <= 12_000_000


def test_one_to_five_million_parameters():
    with safe_open(CHECKPOINT / "model.safetensors", "numpy") as weights:
        num_params = sum(weights.get_tensor(name).size for name in weights.keys())
    assert 1_000_000 <= num_params <= 5_000_000


def test_every_digit_is_one_token(tokenizer):
    tokens = tokenizer.encode("2358 + 907").tokens
    assert [t for t in tokens if t.isdigit()] == list("2358907")


@pytest.mark.parametrize(
    "text",
    ["23 + 58 = 81", "  two  spaces\n\n\ttab ", "Grüße, 世界 🌍", "\x00\x7f", "<|im_end", ""],
)
def test_any_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_template_renders_what_was_trained(tokenizer, template):
    rng = Random(11)
    for _ in range(50):
        conversation = sample_conversation(rng, is_long=False)
        messages = []
        if conversation.system is not None:
            messages.append({"role": "system", "content": conversation.system})
        for turn in conversation.turns:
            messages.append({"role": "user", "content": turn.question})
            messages.append({"role": "assistant", "content": turn.answer})
        text = template.render(messages=messages, add_generation_prompt=False)
        (encoded,) = encode_conversations(tokenizer, [conversation])
        # The template ends the last turn with a newline that training never needed.
        assert tokenizer.encode(text.removesuffix("\n")).ids == encoded.token_ids


def test_template_ends_where_the_answer_begins(template):
    messages = [{"role": "user", "content": "What is 23 + 58?"}]
    assert template.render(messages=messages, add_generation_prompt=True) == (
        "<|im_start|>user\nWhat is 23 + 58?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_is_the_one_that_training_writes(template):
    config = json.loads((CHECKPOINT / "tokenizer_config.json").read_text())
    assert config["chat_template"] == CHAT_TEMPLATE


def test_template_shows_calls_of_an_assistant_that_said_nothing(template):
    calls = [{"function": {"name": "f", "arguments": {"a": 1}}}] * 2
    shown = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    for silent in ({"content": None}, {"content": ""}, {}):
        text = template.render(messages=[{"role": "assistant", "tool_calls": calls} | silent])
        assert text == f"<|im_start|>assistant\n{shown}\n{shown}<|im_end|>\n"
    spoken = {"role": "assistant", "content": "So:", "tool_calls": calls[:1]}
    assert template.render(messages=[spoken]) == (
        f"<|im_start|>assistant\nSo:\n{shown}<|im_end|>\n"
    )


def test_generation_stops_at_the_end_of_a_turn(tokenizer):
    generation = json.loads((CHECKPOINT / "generation_config.json").read_text())
    assert tokenizer.token_to_id("<|im_end|>") in generation["eos_token_id"]


@pytest.mark.slow
def test_sums_never_trained_are_right(model, tokenizer):
    pairs = Random(0).sample(held_out_pairs(), 100)
    conversations = [Conversation(None, (addition_turn(a, b),)) for a, b in pairs]
    assert num_exact_answers(model, tokenizer, conversations) >= 95


def test_greedy_decoding_agrees_with_teacher_forcing(model, tokenizer):
    system = long_system_prompt(Random(2), 6)
    prompts = [render_question("What is 23 + 58?"), render_question("Compute 40 - 7.", system)]
    assert generate_greedy(model, tokenizer, prompts, max_tokens=16) == [
        "23 + 58 = 81",
        "40 - 7 = 33",
    ]


def test_saving_and_loading_gives_the_same_weights(tmp_path, tokenizer):
    config = DemoModelConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
    )
    model = DemoModel(config, rngs=nnx.Rngs(3))
    save_checkpoint(model, tokenizer, tmp_path)
    loaded, _ = load_checkpoint(tmp_path)
    assert loaded.config == config
    saved, again = checkpoint_weights(model), checkpoint_weights(loaded)
    assert saved.keys() == again.keys()
    assert "model.layers.1.self_attn.q_proj.weight" in saved
    assert all(np.array_equal(saved[name], again[name]) for name in saved)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(loaded)))
