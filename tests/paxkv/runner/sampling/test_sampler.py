"""The sampler against a slow, sorted NumPy truth, and its independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.runner.sampling.sampler import argmax_grouped, sample
from paxkv.runner.sampling.sampling_columns import SamplingInputs
from paxkv.runner.shapes.sampling_row import COLUMNS, NUM_COLUMNS
from tests.quick_compile import quick_jit

VOCAB = 300  # three groups, the last one partly filled
NUM_DRAWS = 4096
SAMPLE = quick_jit(sample)


def make_inputs(
    num_rows, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0, seed=0, position=0, logprobs=False
):
    rows_np = np.zeros((num_rows, NUM_COLUMNS), np.int32)
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    integers = {"top_k": top_k, "seed_low": seed, "wants_logprobs": logprobs}
    for name, value in floats.items():
        rows_np[:, COLUMNS.index(name)].view(np.float32)[:] = value
    for name, value in integers.items():
        rows_np[:, COLUMNS.index(name)] = value
    position_np = np.broadcast_to(np.asarray(position, np.int32), (num_rows,))
    return SamplingInputs(rows=rows_np, draw_position=position_np)


def true_distribution(logits_np, temperature=1.0, top_p=1.0, min_p=0.0, top_k=0):
    """The filtered distribution, f64[vocab], as vLLM defines it; logits without ties."""
    scaled = logits_np.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    probs[probs < min_p * probs.max()] = 0
    order = np.argsort(-probs)
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= top_p]] = 0
    return probs / probs.sum()


def likely_few(rng, num_likely=24):
    """Logits with a few likely tokens in all groups, far above the rest."""
    logits_np = rng.uniform(-12, -8, VOCAB)
    logits_np[rng.choice(VOCAB, num_likely, replace=False)] = rng.permutation(
        np.linspace(-1.5, 1.5, num_likely)
    )
    return logits_np.astype(np.float32)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 1.7, "top_k": 11},
        {"top_k": 7},
        {"top_p": 0.5},
        {"top_p": 0.93},
        {"min_p": 0.31},
        {"min_p": 0.12, "top_k": 9, "top_p": 0.8},
        {"temperature": 0.5, "top_k": 20, "top_p": 0.9},
        {"top_k": 5, "top_p": 0.999},
    ],
    ids=str,
)
def test_draws_are_the_filtered_distribution_and_nothing_else(settings):
    rng = np.random.default_rng(len(str(settings)))
    logits_np = likely_few(rng)
    probs_np = true_distribution(logits_np, **settings)
    inputs = make_inputs(NUM_DRAWS, **settings, seed=3, position=np.arange(NUM_DRAWS))
    token_ids = SAMPLE(np.broadcast_to(logits_np, (NUM_DRAWS, VOCAB)), inputs).token_ids
    counts_np = np.bincount(token_ids, minlength=VOCAB)
    if settings.keys() & {"top_k", "top_p", "min_p"}:
        # Every kept token has a chance of over 1 %, so all of them are drawn, and no other.
        assert set(np.nonzero(counts_np)[0]) == set(np.nonzero(probs_np)[0])
    expected_np = probs_np * NUM_DRAWS
    is_common_np = expected_np > 5
    chi_square = ((counts_np - expected_np)[is_common_np] ** 2 / expected_np[is_common_np]).sum()
    freedom = max(is_common_np.sum() - 1, 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom)


def drawn_by_row(logits_np, settings):
    """Tokens that each of several settings draws in one batch, in which their rows take turns."""
    names = {name for each in settings for name in each}
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0}
    turn_np = np.arange(NUM_DRAWS) % len(settings)
    columns = {
        name: np.array([each.get(name, defaults[name]) for each in settings])[turn_np]
        for name in names
    }
    inputs = make_inputs(NUM_DRAWS, **columns, seed=8, position=np.arange(NUM_DRAWS))
    logits_np = np.broadcast_to(logits_np, (NUM_DRAWS, VOCAB))
    token_ids_np = np.asarray(SAMPLE(logits_np, inputs).token_ids)
    return [set(token_ids_np[turn_np == i].tolist()) for i in range(len(settings))]


def test_filters_differ_by_row():
    logits_np = likely_few(np.random.default_rng(1))
    every, *few = drawn_by_row(logits_np, [{"top_k": k} for k in range(6)])  # 0 keeps all
    best = np.argsort(-logits_np)
    assert few == [set(best[:k].tolist()) for k in range(1, 6)]
    assert len(every) >= 24


def test_narrowest_filters_keep_the_most_likely_token():
    logits_np = likely_few(np.random.default_rng(6))
    drawn = drawn_by_row(logits_np, [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
    assert drawn == [{int(logits_np.argmax())}] * 3


def test_tied_tokens_are_kept_or_dropped_together():
    """Chances 1/2, 1/4, 1/8, 1/8: the last two are kept or dropped together."""
    logits_np = np.full(VOCAB, -np.inf, np.float32)
    logits_np[[200, 7, 130, 131]] = np.log([0.5, 0.25, 0.125, 0.125])
    expected = [
        ({"top_p": 0.49}, {200}),
        ({"top_p": 0.74}, {200, 7}),
        ({"top_p": 0.76}, {200, 7, 130, 131}),
        ({"top_k": 2}, {200, 7}),
        ({"top_k": 3}, {200, 7, 130, 131}),
        # top_p counts after top_k: 1/2 of the remaining 3/4 is two thirds.
        ({"top_k": 2, "top_p": 0.66}, {200}),
        ({"top_k": 2, "top_p": 0.67}, {200, 7}),
    ]
    settings, kept = zip(*expected, strict=True)
    assert drawn_by_row(logits_np, settings) == list(kept)


@pytest.mark.parametrize("vocab", [5, 128, 300])
def test_greedy_takes_the_lowest_of_tied_indices(vocab):
    rng = np.random.default_rng(vocab)
    logits_np = rng.integers(-3, 3, (64, vocab)).astype(np.float32)  # full of ties
    np.testing.assert_array_equal(quick_jit(argmax_grouped)(logits_np), logits_np.argmax(axis=1))


def test_greedy_rows_ignore_seed_and_neighbours():
    rng = np.random.default_rng(2)
    logits_np = rng.normal(size=(16, VOCAB)).astype(np.float32)
    temperature = np.array([0, 1, 0, 5, 0, 1, 0, 1] * 2)
    inputs = make_inputs(16, temperature=temperature, top_k=temperature * 3, seed=np.arange(16))
    token_ids = np.asarray(SAMPLE(logits_np, inputs).token_ids)
    greedy = temperature == 0
    np.testing.assert_array_equal(token_ids[greedy], logits_np.argmax(1)[greedy])


def test_draw_depends_on_seed_and_position_not_on_the_batch():
    rng = np.random.default_rng(3)
    logits_np = rng.normal(size=(16, VOCAB)).astype(np.float32)
    settings = {
        "temperature": rng.uniform(0.5, 2, 16),
        "top_p": rng.uniform(0.3, 1, 16),
        "top_k": rng.integers(0, 50, 16),
        "min_p": rng.uniform(0, 0.1, 16),
        "seed": rng.integers(0, 2**31, 16),
        "position": rng.integers(0, 1000, 16),
    }
    whole = np.asarray(SAMPLE(logits_np, make_inputs(16, **settings)).token_ids)
    for rows in (rng.permutation(16), np.array([9, 2, 14])):
        part = {name: values[rows] for name, values in settings.items()}
        token_ids = SAMPLE(logits_np[rows], make_inputs(len(rows), **part)).token_ids
        np.testing.assert_array_equal(token_ids, whole[rows])


def test_seeds_and_positions_give_different_draws():
    logits_np = np.zeros((NUM_DRAWS, VOCAB), np.float32)
    by_position = SAMPLE(logits_np, make_inputs(NUM_DRAWS, position=np.arange(NUM_DRAWS))).token_ids
    by_seed = SAMPLE(logits_np, make_inputs(NUM_DRAWS, seed=np.arange(NUM_DRAWS))).token_ids
    assert len(set(np.asarray(by_position).tolist())) == VOCAB
    assert len(set(np.asarray(by_seed).tolist())) == VOCAB
    assert np.mean(np.asarray(by_position) == np.asarray(by_seed)) < 0.02


def test_token_without_chance_is_never_drawn_at_extreme_logits():
    logits_np = np.full((16, VOCAB), -np.inf, np.float32)
    logits_np[:, 131] = 1e30
    logits_np[:, 7] = -1e30
    for temperature in (1e-5, 1.0, 100.0):
        inputs = make_inputs(16, temperature=temperature, position=np.arange(16))
        assert (np.asarray(SAMPLE(logits_np, inputs).token_ids) == 131).all()


def test_logprobs_come_from_the_raw_logits():
    rng = np.random.default_rng(4)
    logits_np = (rng.normal(size=(16, VOCAB)) * 4).astype(np.float32)
    wants = np.arange(16) % 2 == 0
    inputs = make_inputs(16, temperature=2.0, top_k=40, seed=np.arange(16), logprobs=wants)
    sampled = jax.device_get(SAMPLE(logits_np, inputs))
    x = logits_np.astype(np.float64)
    true_np = x - np.log(np.exp(x).sum(axis=1, keepdims=True))
    drawn_np = true_np[np.arange(16), sampled.token_ids]
    np.testing.assert_allclose(sampled.logprobs, drawn_np, atol=2e-5)
    np.testing.assert_array_equal(sampled.ranks, (true_np > drawn_np[:, None]).sum(1) + 1)
    order = np.argsort(-true_np, axis=1)[:, :20]
    np.testing.assert_array_equal(sampled.top_token_ids, order)
    np.testing.assert_allclose(
        sampled.top_logprobs, np.take_along_axis(true_np, order, 1), atol=2e-5
    )


def test_asking_for_logprobs_does_not_change_the_draw_and_greedy_has_rank_one():
    rng = np.random.default_rng(5)
    logits_np = rng.integers(-2, 2, (16, VOCAB)).astype(np.float32)  # ties at the top
    temperature = np.arange(16) % 2
    without = SAMPLE(logits_np, make_inputs(16, temperature=temperature))
    asked = SAMPLE(logits_np, make_inputs(16, temperature=temperature, logprobs=True))
    np.testing.assert_array_equal(without.token_ids, asked.token_ids)
    assert (np.asarray(asked.ranks)[temperature == 0] == 1).all()
    assert not np.asarray(without.logprobs).any()


def test_vocabulary_smaller_than_the_number_of_top_tokens():
    logits_np = np.array([[0.0, 2.0, 1.0]], np.float32)
    sampled = jax.device_get(SAMPLE(logits_np, make_inputs(1, temperature=0, logprobs=True)))
    assert sampled.top_token_ids[0, :3].tolist() == [1, 2, 0]
    assert sampled.token_ids.tolist() == [1]


def test_draws_are_of_the_words_that_jax_random_gives_for_seed_and_position():
    """Outputs of a seed must not change between versions. Among 256 equal tokens the first word
    says which half it is, the second which of its 128."""
    seed = np.arange(NUM_DRAWS) * 7_654_321 % 2**31
    position = np.arange(NUM_DRAWS) * 977
    logits_np = np.where(np.arange(VOCAB) < 256, 0.0, -np.inf).astype(np.float32)
    inputs = make_inputs(NUM_DRAWS, seed=seed, position=position)
    token_ids = SAMPLE(np.broadcast_to(logits_np, (NUM_DRAWS, VOCAB)), inputs).token_ids

    def words_of(seed, position):
        key = jax.random.wrap_key_data(jnp.stack([jnp.uint32(0), seed]), impl="threefry2x32")
        return jax.random.key_data(jax.random.fold_in(key, position))

    words_np = np.asarray(
        jax.jit(jax.vmap(words_of))(seed.astype(np.uint32), position.astype(np.int32))
    )
    halves_np, places_np = words_np[:, 0] // 2**31, words_np[:, 1] // 2**25
    np.testing.assert_array_equal(token_ids, halves_np * 128 + places_np)
