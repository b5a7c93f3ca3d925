"""`CompiledGenerator` verifies drafts of models with states: no token changes."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from paxkv import SamplingParams
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner.programs import generation
from tests.end_to_end.parity import make_checkpoint
from tests.end_to_end.test_state_drafts import OracleLoopDrafter
from tests.oracles import families

SHAPE = GenerateShape(
    batch_size=5, max_prompt_len=40, max_new_tokens=24, block_size=8, max_stop_ids=200
)
NUM_DRAFTS = 3
NGRAM = {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS, "prompt_lookup_max": 2}
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, max_tokens=21, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=2, top_k=3, max_tokens=24, stop_token_ids=[*range(200)]),
    SamplingParams(temperature=0.0, max_tokens=1),
]


def run(generator: CompiledGenerator, prompts: list[list[int]]) -> tuple[list[list[int]], int]:
    """The tokens of all rows, also of one without a prompt, and the number of steps."""
    inputs = generator._make_inputs(generator._process(prompts, PARAMS, ()))
    outputs = generator._generate(generator._model.params, inputs, generator._draft_params)
    rows = zip(outputs.token_ids.tolist(), outputs.num_tokens.tolist(), strict=True)
    return [row[:num] for row, num in rows], int(outputs.num_steps)


@pytest.mark.parametrize(
    "family",
    ["qwen3.5", "mamba2", *(pytest.param(f, marks=pytest.mark.slow) for f in ("bamba", "jamba"))],
)
def test_drafts_change_no_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    model = load_model(tmp_path, dtype="float32")
    prompts = families.prompts(3, families.VOCAB, [9, 40, 2, 17])
    plain, num_plain_steps = run(CompiledGenerator(model, SHAPE), prompts)
    texts_np = np.full((len(prompts), SHAPE.max_tokens_per_row), -1, np.int32)
    for text_np, prompt, token_ids in zip(texts_np, prompts, plain, strict=False):
        text_np[: len(prompt) + len(token_ids)] = [*prompt, *token_ids]
    # Every fourth draft is wrong, so a step accepts three drafts or fewer.
    monkeypatch.setattr(
        generation,
        "NgramLoopDrafter",
        lambda _: OracleLoopDrafter(jnp.asarray(texts_np), num_drafts=NUM_DRAFTS),
    )
    drafting, num_steps = run(CompiledGenerator(model, SHAPE, speculative_config=NGRAM), prompts)
    assert drafting == plain
    assert [len(token_ids) for token_ids in plain][:2] == [24, 21]
    wanted = max(map(count_steps, map(len, prompts), map(len, plain)))
    assert (num_plain_steps, num_steps) == (23, wanted)
    assert wanted < 12


def count_steps(num_prompt_tokens: int, num_tokens: int) -> int:
    """Steps after that of the prompt, if drafts for every fourth position are wrong."""
    num_steps, position, end = 0, num_prompt_tokens + 1, num_prompt_tokens + num_tokens
    while position < end:
        drafts = range(position, min(position + NUM_DRAFTS, end - 1))
        position = next((place for place in drafts if place % 4 == 0), drafts.stop) + 1
        num_steps += 1
    return num_steps
