"""Requests of the load generator: random, with shared prefixes, or from a ShareGPT file."""

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer


class InputError(ValueError):
    """The requests cannot be made; the message says why and what to do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestInput:
    """One request: a prompt as token ids or text, and the most tokens of its output."""

    prompt: list[int] | str
    max_tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RandomLengths:
    """Random lengths around a middle.

    Args:
        range_ratio: In [0, 1): lengths are uniform in `[n * (1 - r), n * (1 + r)]`, at least 1.
    """

    input_len: int
    output_len: int
    range_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.range_ratio < 1:
            raise InputError(f"--random-range-ratio must be in [0, 1), got {self.range_ratio}.")
        if min(self.input_len, self.output_len) < 1:
            raise InputError(
                f"lengths must be at least 1, got {self.input_len} in and {self.output_len} out."
            )

    def draw(self, middle: int, rng: np.random.Generator) -> int:
        low = max(1, round(middle * (1 - self.range_ratio)))
        return int(rng.integers(low, round(middle * (1 + self.range_ratio)) + 1))


def random_inputs(
    num_requests: int, lengths: RandomLengths, *, token_ids: tuple[int, int], seed: int
) -> list[RequestInput]:
    """Prompts without a shared prefix: uniform token ids in `[low, high)`."""
    return shared_prefix_inputs(
        num_requests, lengths, prefix_len=0, num_prefixes=1, token_ids=token_ids, seed=seed
    )


def shared_prefix_inputs(
    num_requests: int,
    lengths: RandomLengths,
    *,
    prefix_len: int,
    num_prefixes: int,
    token_ids: tuple[int, int],
    seed: int,
) -> list[RequestInput]:
    """Random prompts after `num_prefixes` prefixes, which the requests use in turn.

    Args:
        lengths: Lengths of the part after the prefix, and of the output.
    """
    low, high = token_ids
    if not 0 <= low < high:
        raise InputError(f"--token-ids must be LOW HIGH with 0 <= LOW < HIGH, got {low} {high}.")
    if num_prefixes < 1 or prefix_len < 0:
        raise InputError(
            f"wanted at least one prefix of 0 tokens or more, got {num_prefixes} of {prefix_len}."
        )
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(low, high, (num_prefixes, prefix_len)).tolist()
    inputs = []
    for index in range(num_requests):
        own = rng.integers(low, high, lengths.draw(lengths.input_len, rng)).tolist()
        inputs.append(
            RequestInput(
                prompt=prefixes[index % num_prefixes] + own,
                max_tokens=lengths.draw(lengths.output_len, rng),
            )
        )
    return inputs


def sharegpt_inputs(
    num_requests: int,
    file: Path,
    *,
    tokenizer_file: Path | None,
    output_len: int | None,
    max_total_len: int,
    seed: int,
) -> list[RequestInput]:
    """First questions of conversations in a ShareGPT-format file, drawn without repetition.

    Such a file is a JSON list of `{"conversations": [{"from": "human", "value": ...}, {"from":
    "gpt", "value": ...}, ...]}`.

    Args:
        tokenizer_file: A `tokenizer.json`, or its folder. With it, an output is as long as the
            answer in the file, and conversations of more than `max_total_len` tokens are omitted.
        output_len: Length of every output; required without a tokenizer.
    """
    if tokenizer_file is None and output_len is None:
        raise InputError(
            "--dataset sharegpt needs --tokenizer, which measures the answers in the file, or "
            "--sharegpt-output-len, one length for all outputs."
        )
    tokenizer = None if tokenizer_file is None else _load_tokenizer(tokenizer_file)
    pairs = list(_first_pairs(file))
    random.Random(seed).shuffle(pairs)
    inputs: list[RequestInput] = []
    for question, answer in pairs:
        if len(inputs) == num_requests:
            break
        if tokenizer is None:
            inputs.append(RequestInput(prompt=question, max_tokens=output_len))
            continue
        num_in = len(tokenizer.encode(question).ids)
        num_out = output_len or len(tokenizer.encode(answer, add_special_tokens=False).ids)
        if num_in and num_out and num_in + num_out <= max_total_len:
            inputs.append(RequestInput(prompt=question, max_tokens=num_out))
    if len(inputs) < num_requests:
        raise InputError(
            f"{file} has {len(inputs)} usable conversations, of {len(pairs)} that begin with a "
            f"question and its answer; {num_requests} are needed, warm-up included. Lower "
            "--num-prompts or raise --sharegpt-max-len."
        )
    return inputs


def _first_pairs(file: Path) -> Iterator[tuple[str, str]]:
    """The first question of each conversation that is followed by its answer, and the answer."""
    try:
        conversations = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--dataset-path {file} cannot be read as JSON: {error}") from error
    if not isinstance(conversations, list):
        raise InputError(f"{file} must hold a JSON list, got {type(conversations).__name__}.")
    for conversation in conversations:
        pair = _first_pair(conversation)
        if pair is not None:
            yield pair


def _first_pair(conversation: object) -> tuple[str, str] | None:
    turns = conversation.get("conversations") if isinstance(conversation, dict) else None
    if not isinstance(turns, Sequence):
        return None
    for asked, answered in zip(turns, turns[1:], strict=False):
        # Files of this format use either name.
        if asked.get("from") in ("human", "user") and answered.get("from") in ("gpt", "assistant"):
            question, answer = asked.get("value"), answered.get("value")
            return (question, answer) if question and answer else None
    return None


def _load_tokenizer(path: Path) -> Tokenizer:
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(
            f"--tokenizer: {file} does not exist; name a tokenizer.json or its folder."
        )
    return Tokenizer.from_file(str(file))
