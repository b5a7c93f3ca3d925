"""The decoder through the paged path equals transformers, live and by golden numbers.

Its layers run in a loop, as on a CPU, unless a test says otherwise.
"""

import dataclasses
import functools
from collections.abc import Collection, Mapping

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models import load_model
from models.decoders.decoder import Decoder
from models.families.llama import LlamaConfig, LlamaForCausalLM
from models.registry import FAMILIES, family_class
from tests.models.steppers import IN_TURN, checkpoint_folder, fresh_stepper, in_loop
from tests.oracles.dense_model import dense_logits
from tests.oracles.golden import GoldenSequence, load_golden
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.paged_stepper import PagedStepper
from tests.oracles.recipes import NUM_GREEDY_TOKENS, RECIPES

# Largest difference to the truth, as a share of the largest absolute logit.
TOLERANCE = 1e-4

# One recipe of each kind runs in the normal suite: layers that are alike, with frequencies that
# depend on the length; two kinds in turn, with norms on both sides and caps; and a period of six.
NORMAL_RECIPES = ("rope_dynamic", "gemma2", "gemma3")
# The others run with `pytest -m slow`. `test_parity.py` compares their families with live
# transformers, and `test_rotary.py` has the frequencies of every kind.
SLOW_RECIPES = RECIPES.keys() - NORMAL_RECIPES
# Live transformers say whether the golden numbers are still theirs. One recipe is enough for that
# in the normal run: the others equal the golden numbers.
LIVE_RECIPES = ("gemma2",)


def each_recipe(*, slow: Collection[str]) -> pytest.MarkDecorator:
    marks = dict.fromkeys(slow, pytest.mark.slow)
    recipes = [pytest.param(recipe, marks=marks.get(recipe, ())) for recipe in RECIPES]
    return pytest.mark.parametrize("recipe", recipes)


all_recipes = each_recipe(slow=SLOW_RECIPES)


@functools.cache
def greedy_in_one_go(recipe: str) -> list[np.ndarray]:
    """Prefills the three golden prompts in one step, then feeds their golden tokens one by one.

    Returns each request's logits of all positions that transformers computed.
    """
    stepper, sequences = fresh_stepper(recipe, loops_over_layers=True), load_golden(recipe)
    parts = [stepper.step({row: seq.prompt for row, seq in enumerate(sequences)})]
    for token_idx in range(NUM_GREEDY_TOKENS - 1):
        tokens = {row: [seq.new_tokens[token_idx]] for row, seq in enumerate(sequences)}
        parts.append(stepper.step(tokens))
    return [np.concatenate([part[row] for part in parts]) for row in range(len(sequences))]


def assert_close(got: np.ndarray, truth: np.ndarray) -> None:
    assert np.abs(got - truth).max() <= TOLERANCE * np.abs(truth).max()


def fed_tokens(sequence: GoldenSequence) -> list[int]:
    return sequence.prompt + sequence.new_tokens[:-1]


@all_recipes
def test_logits_equal_golden_numbers_of_transformers(recipe):
    for logits, sequence in zip(greedy_in_one_go(recipe), load_golden(recipe), strict=True):
        assert_close(logits[sequence.positions], sequence.logits)


@all_recipes
def test_greedy_tokens_equal_transformers(recipe):
    for logits, sequence in zip(greedy_in_one_go(recipe), load_golden(recipe), strict=True):
        greedy_tokens = logits[len(sequence.prompt) - 1 :].argmax(axis=-1).tolist()
        assert greedy_tokens == sequence.new_tokens


@all_recipes
def test_logits_of_every_position_equal_dense_float64_model(recipe):
    for logits, sequence in zip(greedy_in_one_go(recipe), load_golden(recipe), strict=True):
        assert_close(logits, dense_logits(checkpoint_folder(recipe), fed_tokens(sequence)))


@all_recipes
def test_chunked_prefill_together_with_decodes_gives_same_logits(recipe):
    stepper = fresh_stepper(recipe, loops_over_layers=True)
    short, _, long = load_golden(recipe)
    fed_short, fed_long = fed_tokens(short), fed_tokens(long)
    # The long sequence arrives in chunks that end inside blocks (of 8) while the short one decodes.
    bounds = [0, 7, 14, 26, 27, 37]
    short_parts = [stepper.step({0: fed_short[:5]})[0]]
    long_parts = []
    for step_idx, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        out = stepper.step({0: fed_short[5 + step_idx : 6 + step_idx], 2: fed_long[start:end]})
        short_parts.append(out[0])
        long_parts.append(out[2])

    in_one_go = greedy_in_one_go(recipe)
    assert_close(np.concatenate(short_parts), in_one_go[0][:10])
    assert_close(np.concatenate(long_parts), in_one_go[2])


@each_recipe(slow=RECIPES.keys() - LIVE_RECIPES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_logits_of_every_position_equal_live_transformers(recipe):
    make_golden = pytest.importorskip("tests.oracles.make_golden")  # needs torch and transformers
    hf_model = make_golden.load_hf_model(checkpoint_folder(recipe))
    longest = load_golden(recipe)[-1]
    new_tokens, hf_logits = make_golden.hf_greedy(hf_model, longest.prompt, NUM_GREEDY_TOKENS)

    assert new_tokens == longest.new_tokens
    assert_close(greedy_in_one_go(recipe)[-1], hf_logits)


@pytest.mark.parametrize("loops_over_layers", [False, True])
@pytest.mark.parametrize("recipe", [pytest.param("llama", marks=pytest.mark.slow), "gemma2"])
def test_last_layer_may_compute_the_last_token_of_each_request_alone(recipe, loops_over_layers):
    """The keys and values of the others are written all the same: later tokens read them."""
    stepper = fresh_stepper(recipe, loops_over_layers=loops_over_layers, only_last_tokens=True)
    fed = [fed_tokens(sequence) for sequence in load_golden(recipe)]
    in_one_go = greedy_in_one_go(recipe)
    ends = [0, 0, 0]
    # Chunks, a decode beside a prompt, a step without the last request, all of the rest.
    for lengths in ((3, 4, 13), (1, 2, 18), (1, 1), (99, 99, 99)):
        chunks = {row: fed[row][ends[row] : ends[row] + n] for row, n in enumerate(lengths)}
        out = stepper.step(chunks)
        for row, chunk in chunks.items():
            ends[row] += len(chunk)
            assert_close(out[row], in_one_go[row][ends[row] - 1 : ends[row]])
    assert ends == [len(tokens) for tokens in fed]


class LoopedLlama(LlamaForCausalLM):
    """Llama whose second and last layer runs three times."""

    @classmethod
    def read_config(cls, hf_config: Mapping[str, object]) -> LlamaConfig:
        config = super().read_config(hf_config)
        return dataclasses.replace(config, num_layers=4, attention=config.attention[:1] * 4)

    def __init__(self, config: LlamaConfig, *, has_head_kernel: bool, dtype: jnp.dtype) -> None:
        super().__init__(config, has_head_kernel=has_head_kernel, dtype=dtype)
        first, second = self.layers[:2]
        self.layers = nnx.List([first, second, second, second])


@pytest.mark.parametrize("loops_over_layers", [pytest.param(False, marks=pytest.mark.slow), True])
def test_layer_at_several_places_computes_as_copies_of_it_do(tmp_path, loops_over_layers):
    """Its weights are loaded and stored once."""
    short = write_random_checkpoint(tmp_path / "short", num_layers=2)
    long = write_random_checkpoint(tmp_path / "long", num_layers=4)
    stored = load_file(short / "model.safetensors")
    copies = {
        name.replace(".layers.1.", f".layers.{idx}."): weight
        for name, weight in stored.items()
        for idx in (1, 2, 3)
    }
    save_file(copies, long / "model.safetensors")

    model = load_model(short, dtype="float32", model_impl=f"{__name__}:LoopedLlama")
    assert len(model.params) == len(stored)
    assert "layers.1.mlp.up_proj.kernel" in model.param_names

    model = dataclasses.replace(model, platform=IN_TURN)
    stepper = PagedStepper(in_loop(model) if loops_over_layers else model)
    tokens = [7, 8, 9, 10, 11, 12]
    got = np.concatenate([stepper.step({0: tokens[:4]})[0], stepper.step({0: tokens[4:]})[0]])
    assert_close(got, dense_logits(long, tokens))


def test_one_program_serves_prompts_chunks_and_decodes():
    greedy_in_one_go("gemma2")
    assert fresh_stepper("gemma2", loops_over_layers=True).num_traces == 1


def test_every_family_derives_from_the_decoder_and_reads_its_own_config():
    for architecture in FAMILIES:
        family = family_class(architecture)
        assert issubclass(family, Decoder)
        assert "read_config" in vars(family)
