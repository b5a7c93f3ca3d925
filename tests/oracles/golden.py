"""Reads the golden numbers that `make_golden.py` took from transformers."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.oracles.recipes import NUM_GREEDY_TOKENS, PROMPT_LENGTHS

GOLDEN_FOLDER = Path(__file__).parent / "golden"
LOGITS_FILE = GOLDEN_FOLDER / "logits.npz"
ROPE_FILE = GOLDEN_FOLDER / "rope.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenSequence:
    """One prompt, its greedy continuation, and the logits of some of their positions."""

    prompt: list[int]
    new_tokens: list[int]
    positions: list[int]
    logits: np.ndarray  # f32[len(positions), vocab]


def golden_positions(prompt_length: int) -> list[int]:
    """Chooses the first, middle and last of the prompt, and the last that was generated from.

    A prompt of 17 and 12 new tokens -> [0, 8, 16, 27]; position 27 is the 11th new token's, whose
    logits gave the 12th.
    """
    last = prompt_length + NUM_GREEDY_TOKENS - 2
    return [0, prompt_length // 2, prompt_length - 1, last]


def load_golden(recipe: str) -> list[GoldenSequence]:
    """Returns the sequences of one recipe."""
    with np.load(LOGITS_FILE) as arrays:
        return [
            GoldenSequence(
                prompt=arrays[f"{recipe}/{prompt_idx}/prompt"].tolist(),
                new_tokens=arrays[f"{recipe}/{prompt_idx}/new_tokens"].tolist(),
                positions=golden_positions(length),
                logits=arrays[f"{recipe}/{prompt_idx}/logits"],
            )
            for prompt_idx, length in enumerate(PROMPT_LENGTHS)
        ]


def load_golden_rope() -> dict[str, dict]:
    """Returns name -> {"hf_config", "frequencies": [{"seq_len", "inv_freq", "cos_sin_scale"}]}."""
    return json.loads(ROPE_FILE.read_text(encoding="utf-8"))
