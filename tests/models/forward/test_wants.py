"""A model returns the hidden states that a batch asks for; nothing is inferred from shapes."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models import ForwardBatch, ModelError, Pages
from models.forward.wants import Outputs, Wants
from paxkv.runner.programs.make_batch import make_batch
from paxkv.runner.shapes.program_shapes import TableShape
from tests.models.steppers import model_of
from tests.oracles.placed_model import place_model

NUM_BLOCKS = 8
STARTS = [0, 3, 5, 6]  # of three requests' tokens
LAST_TOKENS = [2, 4, 5]


def batch_of(wants: Wants, logits_indices: list[int]) -> ForwardBatch:
    return make_batch(
        token_ids=np.arange(5, 11, dtype=np.int32),
        positions=np.asarray([0, 1, 2, 0, 1, 0], np.int32),
        query_start_loc=np.asarray(STARTS, np.int32),
        seq_lens=np.asarray([3, 2, 1], np.int32),
        block_tables=[np.asarray([[[1], [2], [3]]], np.int32)],
        table_shapes=[TableShape(num_groups=1, max_blocks_per_req=1, block_size=8)],
        logits_indices=np.asarray(logits_indices, np.int32),
        wants=wants,
    )


def empty_pages() -> Pages:
    return place_model(model_of("llama"), block_size=8).empty_pages(NUM_BLOCKS)


def outputs_of(wants: Wants, logits_indices: list[int], *, in_loop: bool = False) -> Outputs:
    model = place_model(model_of("llama", in_loop), block_size=8).model
    batch = batch_of(wants, logits_indices)
    return jax.jit(model.forward)(model.params, empty_pages(), batch)[0]


@pytest.fixture(scope="module")
def of_all_tokens() -> Outputs:
    """The expected values: every token's hidden states, also after two of the layers, in NumPy."""
    wants = Wants(logits="indices", hidden="all", taps=(0, 2))
    return jax.device_get(outputs_of(wants, list(range(6))))


def assert_equal(got: jax.Array, wanted: jax.Array) -> None:
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


# Fewer logits than tokens, and several of one request: a guess from shapes would say "last".
@pytest.mark.parametrize("in_loop", [pytest.param(False, marks=pytest.mark.slow), True])
def test_logits_belong_to_the_indices(of_all_tokens, in_loop):
    assert_equal(of_all_tokens.for_logits, of_all_tokens.hidden)
    outputs = outputs_of(Wants(), [0, 1, 4, 4], in_loop=in_loop)
    assert_equal(outputs.for_logits, of_all_tokens.hidden[[0, 1, 4, 4]])
    assert outputs.hidden is None and outputs.taps == ()


# In the normal run, `test_decoder.py` computes the last tokens alone, in turn and in a loop.
@pytest.mark.slow
@pytest.mark.parametrize("in_loop", [False, True])
def test_last_tokens_alone(of_all_tokens, in_loop):
    outputs = outputs_of(Wants(logits="last", hidden="last"), LAST_TOKENS, in_loop=in_loop)
    assert_equal(outputs.for_logits, of_all_tokens.hidden[LAST_TOKENS])
    assert_equal(outputs.hidden, outputs.for_logits)


def test_hidden_of_last_tokens_without_any_logits(of_all_tokens):
    outputs = outputs_of(Wants(logits="none", hidden="last"), [], in_loop=True)
    assert outputs.for_logits is None
    assert_equal(outputs.hidden, of_all_tokens.hidden[LAST_TOKENS])


def test_hidden_of_last_tokens_together_with_other_logits(of_all_tokens):
    """The model computes all rows, as for other wants. Only the choice of outputs is special."""
    batch = batch_of(Wants(logits="indices", hidden="last"), [1])
    assert not batch.drops_rows
    outputs = batch.choose_outputs(of_all_tokens.hidden)
    assert_equal(outputs.for_logits, of_all_tokens.hidden[1:2])
    assert_equal(outputs.hidden, of_all_tokens.hidden[LAST_TOKENS])


@pytest.mark.parametrize("in_loop", [pytest.param(False, marks=pytest.mark.slow), True])
def test_taps_equal_the_end_of_a_model_with_fewer_layers(of_all_tokens, in_loop):
    model = place_model(model_of("llama", in_loop), block_size=8).model
    decoder = nnx.merge(model.graphdef, jax.tree.unflatten(model.params_treedef, model.params))
    assert_equal(decoder.norm(of_all_tokens.taps[1]), of_all_tokens.hidden)
    decoder.layers = nnx.List(decoder.layers[:1])
    decoder.config = dataclasses.replace(model.config, attention=model.config.attention[:1])
    batch = batch_of(Wants(hidden="all"), [0])
    settings = (model.kernels, model.platform, model.places[:1])
    shorter, _ = jax.jit(lambda pages: decoder(batch, pages, *settings))(empty_pages())
    assert_equal(decoder.norm(of_all_tokens.taps[0]), shorter.hidden)
    taps = outputs_of(Wants(logits="none", taps=(0, 2)), [0], in_loop=in_loop).taps
    for got, wanted in zip(taps, of_all_tokens.taps, strict=True):
        assert_equal(got, wanted)


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 0), (1, 1)])
def test_taps_that_are_no_layers_are_refused(taps):
    with pytest.raises(ModelError, match=r"taps are .* wanted different layers"):
        outputs_of(Wants(taps=taps), [0])


def test_a_step_of_one_token_each_needs_no_rows_dropped():
    batch = batch_of(Wants(logits="last"), LAST_TOKENS)
    assert batch.drops_rows
    assert not dataclasses.replace(batch, max_query_len=1).drops_rows
    for wants in (Wants(logits="last", hidden="all"), Wants(logits="last", taps=(0,)), Wants()):
        assert not batch_of(wants, LAST_TOKENS).drops_rows
