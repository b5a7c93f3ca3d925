"""`CompiledGenerator` generates the same tokens with a draft model and without drafts."""

import random

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import ModelConfigError, load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.config.speculative_config import SpeculativeConfig
from paxkv.errors import ConfigError
from paxkv.generate import CompiledGenerator, GenerateShape
from paxkv.runner.programs.generation_drafts import load_drafts
from tests.oracles.make_checkpoint import write_random_checkpoint

NUM_DRAFTS = 3
SHAPE = GenerateShape(batch_size=6, max_prompt_len=9, max_new_tokens=20, block_size=4)


def write_like(folder, target, *, noise):
    """Writes a copy of a checkpoint, with noise in its weights."""
    folder.mkdir()
    (folder / "config.json").write_text((target / "config.json").read_text())
    rng = np.random.default_rng(0)
    weights = {
        name: (weight + noise * rng.standard_normal(weight.shape)).astype(weight.dtype)
        for name, weight in load_file(target / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The target, a model that is often right, and one of another family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    target = write_random_checkpoint(folder / "target", num_layers=2)
    return {
        "target": target,
        "similar": write_like(folder / "similar", target, noise=0.01),
        "other": write_random_checkpoint(
            *(folder / "other", "qwen3"), num_layers=1, hidden_size=32, num_kv_heads=1
        ),
    }


@pytest.fixture(scope="module")
def generators(folders):
    """Draft model -> generator; the generator for None has no drafts."""
    model = load_model(folders["target"], dtype="float32")

    def make(name):
        settings = {"method": "draft_model", "model": str(folders[name])}
        settings["num_speculative_tokens"] = NUM_DRAFTS
        return CompiledGenerator(model, SHAPE, speculative_config=settings)

    found = {None: CompiledGenerator(model, SHAPE)} | {name: make(name) for name in folders}
    # Both draft models have weights of the same shapes, so one program serves both.
    found["similar"]._generate = found["target"]._generate
    return found


def run(generator, prompts, params):
    """Returns the tokens, and the number of steps after the step of the prompts."""
    inputs = generator._make_inputs(generator._process(prompts, params, ()))
    outputs = generator._generate(generator._model.params, inputs, generator._draft_params)
    rows = zip(outputs.token_ids.tolist(), outputs.num_tokens.tolist(), strict=True)
    return [row[:num] for row, num in rows][: len(prompts)], int(outputs.num_steps)


SAMPLED = {"temperature": 1.0, "max_tokens": 20}
# Every request processes its logits, so that only one program is compiled.
SETTINGS = [
    {"temperature": 0.0, "max_tokens": 20, "logit_bias": {7: 1.0}},
    SAMPLED | {"seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    SAMPLED | {"seed": 2, "logit_bias": {4: 1.0}, "temperature": 0.3},
    SAMPLED | {"seed": 3, "stop_token_ids": [*range(20, 28)], "logit_bias": {9: 0.5}},
    {"temperature": 0.0, "max_tokens": 1, "logit_bias": {7: 1.0}},
    {"temperature": 0.0, "max_tokens": 17, "presence_penalty": 0.2},
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "name", ["target", "similar", pytest.param("other", marks=pytest.mark.slow)]
)
def test_tokens_are_those_without_drafts(generators, name, seed):
    rng = random.Random(seed)
    params = [SamplingParams(**settings) for settings in rng.sample(SETTINGS, rng.randint(2, 6))]
    lengths = [9, *(rng.randint(1, 9) for _ in params[1:])]
    prompts = [rng.choices(range(4, 160), k=length) for length in lengths]
    (plain, num_plain_steps), (drafting, num_steps) = (
        run(generators[key], prompts, params) for key in (None, name)
    )
    assert drafting == plain
    assert any(len(token_ids) > 1 for token_ids in plain)
    assert num_steps <= num_plain_steps


# The bias changes no token. Without it, the request would need a second program.
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, logit_bias={7: 1e-6})
PROMPTS = [[5, 9, 30, 7, 120], [44] * 9, [3]]


def test_the_target_accepts_all_of_its_own_drafts(generators):
    """So its own keys and values are right in every step, whatever the lengths of prompts."""
    plain, num_plain_steps = run(generators[None], PROMPTS, [GREEDY] * 3)
    drafting, num_steps = run(generators["target"], PROMPTS, [GREEDY] * 3)
    assert drafting == plain
    # The step of the prompts draws one token, the next four steps four each, the last one three.
    assert num_plain_steps == 19 and num_steps == 5


def test_a_similar_model_is_right_now_and_then(generators):
    plain, num_plain_steps = run(generators[None], PROMPTS, [GREEDY] * 3)
    drafting, num_steps = run(generators["similar"], PROMPTS, [GREEDY] * 3)
    assert drafting == plain
    assert 5 < num_steps < num_plain_steps


@pytest.mark.parametrize("method", ["suffix", "mtp"])
def test_other_methods_are_refused(generators, method):
    config = SpeculativeConfig(method=method, num_speculative_tokens=2)
    with pytest.raises(ConfigError, match=f"'ngram' and 'draft_model', got '{method}'"):
        load_drafts(config, generators[None]._model, max_model_len=None)


def test_another_vocabulary_is_refused(generators, tmp_path):
    small = write_random_checkpoint(tmp_path / "small", num_layers=1, vocab_size=80)
    config = SpeculativeConfig(method="draft_model", model=str(small), num_speculative_tokens=2)
    with pytest.raises(ModelConfigError, match="speculative_config: the draft model has vocab_siz"):
        load_drafts(config, generators[None]._model, max_model_len=None)
