"""`CompiledGenerator` verifies drafts of models with states: no token changes."""

import operator
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

pytest.importorskip("torch")
pytest.importorskip("transformers")

from models import load_model
from paxkv import SamplingParams
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner.programs import generation
from tests.end_to_end.parity import make_checkpoint
from tests.end_to_end.test_state_drafts import OracleLoopDrafter
from tests.oracles import families
from tests.paxkv.runner.greedy_draws import greedy_draws

if TYPE_CHECKING:
    import torch

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


def run(
    generator: CompiledGenerator, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[list[int]], int]:
    """The tokens of all rows, also of one without a prompt, and the number of steps."""
    inputs = generator._make_inputs(generator._process(prompts, params, ()))
    outputs = generator._generate(generator._model.params, inputs, generator._draft_params)
    rows = zip(outputs.token_ids.tolist(), outputs.num_tokens.tolist(), strict=True)
    return [row[:num] for row, num in rows], int(outputs.num_steps)


@pytest.mark.parametrize(
    "family",
    ["qwen3.5", *(pytest.param(f, marks=pytest.mark.slow) for f in ("mamba2", "bamba", "jamba"))],
)
def test_drafts_change_no_token(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(family, tmp_path, 1, is_shallow=True, is_sharp=True)
    model = load_model(tmp_path, dtype="float32")
    prompts = families.prompts(3, families.VOCAB, [9, 40, 2, 17])
    plain, num_plain_steps = run(CompiledGenerator(model, SHAPE), prompts, PARAMS)
    texts_np = np.full((len(prompts), SHAPE.max_tokens_per_row), -1, np.int32)
    for text_np, prompt, token_ids in zip(texts_np, prompts, plain, strict=False):
        text_np[: len(prompt) + len(token_ids)] = [*prompt, *token_ids]
    # Every fourth draft is wrong, so a step accepts three drafts or fewer.
    monkeypatch.setattr(
        generation,
        "NgramLoopDrafter",
        lambda _: OracleLoopDrafter(jnp.asarray(texts_np), num_drafts=NUM_DRAFTS),
    )
    generator = CompiledGenerator(model, SHAPE, speculative_config=NGRAM)
    drafting, num_steps = run(generator, prompts, PARAMS)
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


GREEDY = [SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)] * 4


def add_noise(target: Path, folder: Path) -> Path:
    """Writes a copy of a checkpoint whose model predicts other tokens now and then."""
    shutil.copytree(target, folder)
    rng = np.random.default_rng(0)
    weights = {
        name: weight + 0.004 * rng.standard_normal(weight.shape).astype(weight.dtype)
        for name, weight in load_file(target / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ("mamba2", "similar"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                *(("mamba2", "same"), ("qwen3.5", "same")),
                *(("llama", "mamba2"), ("qwen3.5", "bamba")),
            )
        ),
    ],
)
def test_draft_models_have_states(target: str, draft: str, tmp_path: Path) -> None:
    """The drafts are those of transformers, so states are right after rejected drafts too."""
    folder = tmp_path / "target"
    theirs = make_checkpoint(target, folder, 1, is_shallow=True, is_sharp=True)
    if draft == "similar":
        draft_folder = add_noise(folder, tmp_path / "similar")
        theirs = type(theirs).from_pretrained(draft_folder, dtype="float32")
    elif draft != "same":
        draft_folder = tmp_path / "draft"
        theirs = make_checkpoint(draft, draft_folder, 2, is_shallow=True, is_sharp=True)
    settings = {"method": "draft_model", "num_speculative_tokens": NUM_DRAFTS}
    settings["model"] = str(folder if draft == "same" else draft_folder)
    model = load_model(folder, dtype="float32")
    prompts = families.prompts(3, families.VOCAB, [9, 40, 2, 17])
    with greedy_draws():
        plain, num_plain_steps = run(CompiledGenerator(model, SHAPE), prompts, GREEDY)
        generator = CompiledGenerator(model, SHAPE, speculative_config=settings)
        drafting, num_steps = run(generator, prompts, GREEDY)
    assert drafting == plain
    wanted = [
        count_steps_of(theirs, prompt, answer)
        for prompt, answer in zip(prompts, plain, strict=False)
    ]
    assert num_steps == max(wanted) <= num_plain_steps
    if draft == "same":
        assert wanted == [6] * 4
    elif draft == "similar":
        assert all(6 < steps < num_plain_steps for steps in wanted)


def count_steps_of(draft_model: "torch.nn.Module", prompt: list[int], answer: list[int]) -> int:
    """Steps after that of the prompt, with drafts of a model of transformers."""
    text, num_steps, position = prompt + answer, 0, len(prompt) + 1
    while position < len(text):
        num_drafts = min(NUM_DRAFTS, len(text) - position - 1)
        drafts, _, _ = families.greedy(draft_model, text[:position], NUM_DRAFTS)
        rest = text[position : position + num_drafts]
        num_right = [*map(operator.eq, drafts, rest), False].index(False)
        position += num_right + 1
        num_steps += 1
    return num_steps
