"""Writes the serving golden files: `python -m tests.oracles.make_serving_golden` (needs torch)."""

import tempfile
from pathlib import Path

import numpy as np
import torch

from tests.oracles.make_golden import MIN_RELATIVE_GAP, hf_greedy, load_hf_model
from tests.oracles.serving_golden import (
    LONG_FILE,
    LONG_NUM_NEW_TOKENS,
    LONG_PROMPT_LEN,
    NUM_NEW_TOKENS,
    SERVING_RECIPES,
    ServingGolden,
    draw_prompts,
    serving_golden_file,
    write_long_recipe,
    write_serving_recipe,
)


@torch.no_grad()
def greedy_without_cache(
    model: torch.nn.Module, prompt: list[int]
) -> tuple[list[int], np.ndarray]:  # f32[NUM_NEW_TOKENS, vocab]
    """The slowest, plainest loop: the whole sequence again for every new token."""
    tokens, logits = list(prompt), []
    for _ in range(NUM_NEW_TOKENS):
        logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].numpy())
        tokens.append(int(np.argmax(logits[-1])))
    return tokens[len(prompt) :], np.stack(logits)


def make_sequences(model: torch.nn.Module, seed: int) -> list[ServingGolden]:
    """Draws prompts until no greedy step is a near tie, which rounding would decide."""
    rng = np.random.RandomState(seed)
    while True:
        golden = []
        for prompt in draw_prompts(model.config.vocab_size, rng):
            new_tokens, logits = greedy_without_cache(model, prompt)
            golden.append(ServingGolden(prompt=prompt, new_tokens=new_tokens, logits=logits))
        if _is_clear(np.stack([g.logits for g in golden])):
            return golden


def make_long_sequence(model: torch.nn.Module) -> ServingGolden:
    """The same for the long prompt, generated with a cache."""
    rng = np.random.RandomState(0)
    while True:
        prompt = rng.randint(3, model.config.vocab_size, LONG_PROMPT_LEN).tolist()
        new_tokens, logits = hf_greedy(model, prompt, LONG_NUM_NEW_TOKENS)
        if _is_clear(logits[-LONG_NUM_NEW_TOKENS:]):
            return ServingGolden(
                prompt=prompt, new_tokens=new_tokens, logits=logits[-LONG_NUM_NEW_TOKENS:]
            )


def _is_clear(logits: np.ndarray) -> bool:
    top_two = np.sort(logits, axis=-1)[..., -2:]
    return (top_two[..., 1] - top_two[..., 0]).min() > MIN_RELATIVE_GAP * np.abs(logits).max()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for recipe in SERVING_RECIPES:
            model = load_hf_model(write_serving_recipe(Path(folder) / recipe, recipe))
            arrays = {}
            sequences = make_sequences(model, seed=len(recipe))
            for i, golden in enumerate(sequences):
                arrays[f"{i}/prompt"] = np.array(golden.prompt, np.int32)
                arrays[f"{i}/new_tokens"] = np.array(golden.new_tokens, np.int32)
                arrays[f"{i}/logits"] = golden.logits
            np.savez_compressed(serving_golden_file(recipe), **arrays)
            print(serving_golden_file(recipe).name, *(g.new_tokens for g in sequences), sep="\n")
        long = make_long_sequence(load_hf_model(write_long_recipe(Path(folder) / "long")))
    np.savez_compressed(
        LONG_FILE,
        prompt=np.array(long.prompt, np.int32),
        new_tokens=np.array(long.new_tokens, np.int32),
        logits=long.logits,
    )
    print(LONG_FILE.name, long.new_tokens, sep="\n")


if __name__ == "__main__":
    main()
