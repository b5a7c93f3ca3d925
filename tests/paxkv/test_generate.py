"""`CompiledGenerator` draws the same tokens as the engine and as transformers."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from models import load_model
from paxkv.config.sampling_params import SamplingParams
from paxkv.errors import (
    ConfigError,
    ForkedProcessError,
    InvalidRequestError,
    PromptTooLongError,
)
from paxkv.generate import CompiledGenerator, GenerateInputs, GenerateShape, make_generate
from paxkv.runner.sampling.row_state import pack_row, processors_of
from paxkv.runner.sampling.sampling_columns import encode_sampling_params
from paxkv.runner.shapes.sampling_row import NUM_COLUMNS
from tests.end_to_end.engine_harness import EngineSettings, RecordingRunner, run_engine
from tests.oracles.make_checkpoint import write_random_checkpoint
from tests.oracles.serving_golden import NUM_NEW_TOKENS, load_serving_golden, write_serving_recipe
from tests.paxkv.runner.tiny_model import VOCAB, TinyModel
from tests.quick_compile import quick_jit

SHAPE = GenerateShape(batch_size=8, max_prompt_len=101, max_new_tokens=NUM_NEW_TOKENS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_serving_recipe(tmp_path_factory.mktemp("generate") / "llama", "llama")


@pytest.fixture(scope="module")
def generator(checkpoint) -> CompiledGenerator:
    return CompiledGenerator(load_model(checkpoint, dtype="float32"), SHAPE)


def test_greedy_tokens_are_transformers(generator: CompiledGenerator) -> None:
    golden = load_serving_golden("llama")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    tokens = generator.generate([g.prompt for g in golden], params)
    assert tokens == [g.new_tokens for g in golden]


# In the normal run, `test_groups_of_two_block_sizes_have_blocks_of_their_own` has a window and two
# groups, and `test_parity.py` generates with Qwen3-Next.
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["gemma3_shallow", "gemma3", "qwen2_window"])
def test_greedy_tokens_of_several_groups_are_transformers(recipe, tmp_path) -> None:
    golden = load_serving_golden(recipe)
    model = load_model(write_serving_recipe(tmp_path / recipe, recipe), dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    tokens = CompiledGenerator(model, SHAPE).generate([g.prompt for g in golden], params)
    assert tokens == [g.new_tokens for g in golden]


def test_groups_of_two_block_sizes_have_blocks_of_their_own() -> None:
    """A layer with one KV head has twice as many tokens in a block, so it has another group.

    The third row of the batch is empty.
    """
    model = TinyModel(windows=(5, None, None), num_kv_heads=(2, 2, 1))
    shape = GenerateShape(batch_size=3, max_prompt_len=11, max_new_tokens=15, block_size=4)
    prompts = [[7, 3, 9, 20, 4, 4, 31, 8, 15, 2, 6], [5, 1, 40], []]
    inputs = GenerateInputs(
        prompt_token_ids=np.array([p + [0] * (11 - len(p)) for p in prompts], np.int32),
        prompt_lens=np.array([len(p) for p in prompts], np.int32),
        max_new_tokens=np.full(3, 15, np.int32),
        stop_token_ids=np.full((3, shape.max_stop_ids), VOCAB, np.int32),
        sampling_rows=np.zeros((3, NUM_COLUMNS), np.int32),
    )
    outputs = quick_jit(make_generate(model, shape))(model.params, inputs)
    assert outputs.num_tokens.tolist() == [15, 15, 0]
    assert {place.inputs_idx for ((_, place),) in model.places} == {0, 1}
    assert outputs.token_ids[2].tolist() == [0] * 15
    for tokens, prompt in zip(outputs.token_ids[:2].tolist(), prompts[:2], strict=True):
        sequence = list(prompt)
        for _ in range(15):
            sequence.append(int(model.dense_logits(sequence)[-1].argmax()))
        assert tokens == sequence[len(prompt) :]


# `tests/end_to_end/test_compiled_generator.py` compares draws of the demo model in the normal run.
@pytest.mark.slow
def test_seeded_draws_are_the_engines(generator: CompiledGenerator, checkpoint) -> None:
    prompts = [g.prompt for g in load_serving_golden("llama")]
    settings = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=9),
        SamplingParams(temperature=1.3, top_k=20, seed=8, max_tokens=12),
        SamplingParams(temperature=0.7, top_p=0.8, seed=9, max_tokens=5),
        SamplingParams(temperature=1.0, min_p=0.05, seed=10, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=3),
        SamplingParams(temperature=1.0, seed=2**40 + 1, max_tokens=12),
    ]
    result = run_engine(
        RecordingRunner(checkpoint, 16),
        prompts,
        EngineSettings(block_size=16, num_blocks=64),
        sampling_params=settings,
    )
    assert generator.generate(prompts, settings) == result.token_ids


def test_rows_stop_on_their_own(generator: CompiledGenerator) -> None:
    golden = load_serving_golden("llama")[:3]
    first, second, third = (g.new_tokens for g in golden)
    settings = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=12, stop_token_ids=[second[2]]),
        SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True),
    ]
    tokens = generator.generate([g.prompt for g in golden], settings, eos_token_ids=[third[1]])
    stop = second.index(second[2])
    assert tokens == [first[:4], second[: stop + 1], third]


def test_eos_ends_a_row(generator: CompiledGenerator) -> None:
    golden = load_serving_golden("llama")[0]
    eos = golden.new_tokens[3]
    params = SamplingParams(temperature=0.0, max_tokens=12)
    (tokens,) = generator.generate([golden.prompt], params, eos_token_ids=[eos])
    assert tokens == golden.new_tokens[: golden.new_tokens.index(eos) + 1]


def test_prompts_must_be_shorter_than_the_models_positions(tmp_path) -> None:
    folder = write_random_checkpoint(tmp_path, num_layers=1, max_position_embeddings=8)
    shape = GenerateShape(batch_size=2, max_prompt_len=9, max_new_tokens=5)
    generator = CompiledGenerator(load_model(folder, dtype="float32"), shape)
    with pytest.raises(PromptTooLongError, match="context length is 8 tokens"):
        generator.generate([[3] * 8], SamplingParams(max_tokens=1))


@pytest.fixture(scope="module")
def scaled_folder(tmp_path_factory) -> Path:
    """A model with 16 positions, which YaRN scales to 64."""
    return write_random_checkpoint(
        tmp_path_factory.mktemp("scaled"),
        num_layers=1,
        max_position_embeddings=16,
        rope={"rope_type": "yarn", "factor": 4.0},
    )


@pytest.fixture(scope="module")
def scaled_generator(scaled_folder) -> CompiledGenerator:
    shape = GenerateShape(batch_size=2, max_prompt_len=60, max_new_tokens=12)
    return CompiledGenerator(load_model(scaled_folder, dtype="float32"), shape)


@pytest.fixture(scope="module")
def scaled_tokens(scaled_generator) -> list[list[int]]:
    """Tokens that are generated after prompts of 40 and 57 tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=12)
    return scaled_generator.generate(scaled_prompts(), params)


def scaled_prompts() -> list[list[int]]:
    return [np.random.default_rng(0).integers(1, 160, n).tolist() for n in (40, 57)]


@pytest.mark.slow
def test_tokens_at_scaled_positions_are_the_engines(scaled_folder, scaled_tokens) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12)
    result = run_engine(
        RecordingRunner(scaled_folder, 16, max_model_len=64),
        scaled_prompts(),
        EngineSettings(block_size=16, num_blocks=64),
        sampling_params=[params] * 2,
    )
    assert scaled_tokens == result.token_ids


def test_rows_end_where_the_scaled_positions_do(
    scaled_folder, scaled_generator, scaled_tokens
) -> None:
    assert [len(row) for row in scaled_tokens] == [12, 7]
    params = SamplingParams(temperature=0.0, max_tokens=None)
    assert scaled_generator.generate(scaled_prompts(), params) == scaled_tokens
    shape = GenerateShape(batch_size=2, max_prompt_len=60, max_new_tokens=12)
    model = load_model(scaled_folder, dtype="float32")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    with pytest.raises(PromptTooLongError, match="context length is 16 tokens"):
        CompiledGenerator(model, shape, max_model_len=16).generate(scaled_prompts(), params)


@pytest.mark.parametrize(
    ("max_model_len", "word"), [(129, "129.*128 positions"), (1, "at least 2")]
)
def test_max_model_len_must_fit_the_model(tmp_path, max_model_len, word) -> None:
    folder = write_random_checkpoint(tmp_path, num_layers=1, max_position_embeddings=128)
    model = load_model(folder, dtype="float32")
    with pytest.raises(ConfigError, match=word):
        CompiledGenerator(model, SHAPE, max_model_len=max_model_len)


# In the normal run, `test_groups_of_two_block_sizes_have_blocks_of_their_own` has an empty row.
@pytest.mark.slow
def test_empty_rows_generate_nothing(checkpoint) -> None:
    model = load_model(checkpoint, dtype="float32")
    shape = GenerateShape(batch_size=2, max_prompt_len=3, max_new_tokens=2)
    inputs = GenerateInputs(
        prompt_token_ids=np.zeros((2, 3), np.int32),
        prompt_lens=np.zeros(2, np.int32),
        max_new_tokens=np.ones(2, np.int32),
        stop_token_ids=np.full((2, shape.max_stop_ids), model.config.vocab_size, np.int32),
        sampling_rows=np.zeros((2, NUM_COLUMNS), np.int32),
    )
    outputs = quick_jit(make_generate(model, shape))(model.params, inputs)
    assert outputs.num_tokens.tolist() == [0, 0]
    assert not np.asarray(outputs.token_ids).any()


@pytest.mark.parametrize(
    ("prompts", "settings", "error", "word"),
    [
        ([[]], {}, InvalidRequestError, "prompt is empty"),
        ([[1] * 102], {}, PromptTooLongError, "max_prompt_len=102"),
        ([[1, 160]], {}, InvalidRequestError, "160"),
        ([[1]], {"max_tokens": 13}, InvalidRequestError, "max_new_tokens=12"),
        ([[1]] * 9, {}, InvalidRequestError, "batch_size=8"),
        ([[1]], {"max_tokens": None, "min_tokens": 13}, InvalidRequestError, r"in \[0, 12\]"),
        (["1"], {}, InvalidRequestError, "list of token ids, got str"),
        ([[1]], {"allowed_token_ids": [160]}, InvalidRequestError, "160"),
        ([[1]], {"stop_token_ids": list(range(9))}, InvalidRequestError, "max_stop_ids=8"),
    ],
)
def test_what_does_not_fit_is_refused(generator, prompts, settings, error, word) -> None:
    with pytest.raises(error, match=word):
        generator.generate(prompts, SamplingParams(**({"max_tokens": 2} | settings)))


def packed_inputs(shape: GenerateShape, vocab_size: int, *, max_model_len: int) -> GenerateInputs:
    """Inputs of three rows. Each row allows one token, and the last row has no prompt."""
    tokens = (20, 30, 40)
    params = [SamplingParams(temperature=0.0, allowed_token_ids=[token]) for token in tokens]
    sampling_rows = [
        encode_sampling_params(
            p,
            seed=0,
            vocab_size=vocab_size,
            num_prompt_tokens=3,
            processors=processors_of(p, (), needs_grammar=False),
        )
        for p in params
    ]
    packed_rows = [
        pack_row(
            0,
            np.ones(3, np.int32),
            p,
            bad_words_token_ids=(),
            early_end_ids=(),
            max_model_len=max_model_len,
            vocab_size=vocab_size,
        )
        for p in params
    ]
    return GenerateInputs(
        prompt_token_ids=np.ones((3, shape.max_prompt_len), np.int32),
        prompt_lens=np.array([3, 3, 0], np.int32),
        max_new_tokens=np.array([4, 2, 4], np.int32),
        stop_token_ids=np.full((3, shape.max_stop_ids), vocab_size, np.int32),
        sampling_rows=np.stack(sampling_rows),
        packed_rows=np.stack(packed_rows),
    )


def packed_program(folder: Path):
    model = load_model(write_random_checkpoint(folder, num_layers=1), dtype="float32")
    shape = GenerateShape(batch_size=3, max_prompt_len=4, max_new_tokens=NUM_NEW_TOKENS)
    return model, shape, quick_jit(make_generate(model, shape))


# In the normal run, `end_to_end/test_compiled_generator.py` compares such rows with an engine.
@pytest.mark.slow
def test_packed_rows_are_of_the_row_in_their_place(tmp_path) -> None:
    model, shape, generate = packed_program(tmp_path)
    most = shape.max_tokens_per_row
    inputs = packed_inputs(shape, model.config.vocab_size, max_model_len=most)
    outputs = generate(model.params, inputs)
    assert outputs.token_ids[:, :4].tolist() == [[20] * 4, [30, 30, 0, 0], [0] * 4]
    assert outputs.num_tokens.tolist() == [4, 2, 0]


def test_packed_rows_have_the_length_of_the_shape(tmp_path) -> None:
    model, shape, generate = packed_program(tmp_path)
    most = shape.max_tokens_per_row
    inputs = packed_inputs(shape, model.config.vocab_size, max_model_len=most + 1)
    with pytest.raises(ConfigError, match=f"packed_rows .* max_model_len={most}"):
        generate(model.params, inputs)


def test_prompts_may_be_arrays(generator: CompiledGenerator) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3)
    wanted = generator.generate([[3, 4], [5, 6]], params, eos_token_ids=[2])
    array_np = np.array([[3, 4], [5, 6]])
    for prompts in (array_np, jnp.asarray(array_np), [list(row) for row in array_np]):
        assert generator.generate(prompts, params, eos_token_ids=np.array([2])) == wanted
    for prompt, got in ((array_np, r"shape \(2, 2\)"), (np.array([1.5]), "is 1.5")):
        with pytest.raises(InvalidRequestError, match=got):
            generator.generate([prompt], params)


@pytest.mark.parametrize(
    ("eos_token_ids", "got"),
    [([-1], r"\[-1\]"), ([2.0], r"\[2.0\]"), (None, "NoneType"), ({2}, "set")],
)
def test_eos_tokens_must_be_token_ids(generator, eos_token_ids, got) -> None:
    wanted = f"eos_token_ids must be .*, got {got}"
    with pytest.raises(InvalidRequestError, match=wanted):
        generator.generate([[1]], SamplingParams(max_tokens=2), eos_token_ids=eos_token_ids)


def test_one_setting_for_each_prompt(generator: CompiledGenerator) -> None:
    with pytest.raises(InvalidRequestError, match="2 prompts and 1 SamplingParams"):
        generator.generate([[3], [4]], [SamplingParams(max_tokens=1)])


def test_shape_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="batch_size"):
        GenerateShape(batch_size=0, max_prompt_len=1, max_new_tokens=1)


def test_a_fork_of_the_process_is_refused(checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = CompiledGenerator(load_model(checkpoint, dtype="float32"), SHAPE)
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ForkedProcessError, match="this CompiledGenerator was created in process"):
        generator.generate([[1]], SamplingParams(max_tokens=1))
