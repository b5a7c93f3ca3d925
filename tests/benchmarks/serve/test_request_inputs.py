"""Requests have the lengths, shared prefixes and texts of the flags."""

import json
from pathlib import Path

import pytest

from benchmarks.serve.request_inputs import (
    InputError,
    RandomLengths,
    random_inputs,
    shared_prefix_inputs,
    sharegpt_inputs,
)

TOKEN_IDS = (100, 200)


def test_random_lengths_fill_their_range() -> None:
    lengths = RandomLengths(input_len=20, output_len=10, range_ratio=0.5)
    inputs = random_inputs(2000, lengths, token_ids=TOKEN_IDS, seed=0)
    assert {len(request.prompt) for request in inputs} == set(range(10, 31))
    assert {request.max_tokens for request in inputs} == set(range(5, 16))
    assert {token for request in inputs for token in request.prompt} == set(range(*TOKEN_IDS))


def test_prefixes_are_shared_in_turn_and_nothing_else_is() -> None:
    settings = {"prefix_len": 50, "num_prefixes": 2, "token_ids": TOKEN_IDS, "seed": 0}
    inputs = shared_prefix_inputs(6, RandomLengths(input_len=30, output_len=1), **settings)
    prefixes = [request.prompt[:50] for request in inputs]
    assert prefixes == [prefixes[0], prefixes[1]] * 3 and prefixes[0] != prefixes[1]
    assert {len(request.prompt) for request in inputs} == {80}
    assert len({tuple(request.prompt[50:]) for request in inputs}) == 6


def turn(text: str) -> dict[str, str]:
    return dict(zip(("from", "value"), text.split(":"), strict=True))


def test_sharegpt_outputs_are_as_long_as_the_answers(tmp_path: Path) -> None:
    # Two usable ones; then one without an answer, one that is too long, and an empty one.
    conversations = [
        ["human:a b c", "gpt:a b", "human:c", "gpt:a"],
        ["system:a", "human:b b", "gpt:c c c"],
        ["human:a"],
        ["human:" + "a " * 40, "gpt:b"],
        [],
    ]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": list(map(turn, c))} for c in conversations]))
    # One token per word.
    words = {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "c": 2, "?": 3}, "unk_token": "?"}
    tokenizer = {"version": "1.0", "model": words, "pre_tokenizer": {"type": "Whitespace"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = {"tokenizer_file": tmp_path, "output_len": None, "max_total_len": 10, "seed": 0}
    inputs = sharegpt_inputs(2, file, **settings)
    found = {(request.prompt, request.max_tokens) for request in inputs}
    assert found == {("a b c", 2), ("b b", 3)}
    with pytest.raises(InputError, match="has 2 usable conversations, of 3"):
        sharegpt_inputs(3, file, **settings)
