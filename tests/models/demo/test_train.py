"""Tests of the training loop on a tiny model: the loss falls, an interrupted run goes on."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from models.demo import train
from models.demo.batches import training_batch
from models.demo.optimizer import make_optimizer
from models.demo.tokenizer_training import train_tokenizer
from models.demo.training_model import DemoModel, DemoModelConfig

TINY = DemoModelConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
CONFIG = train.TrainingConfig(num_steps=6)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(seed=0, vocab_size=TINY.vocab_size, num_conversations=300)


@pytest.fixture(scope="module")
def shared_optimizer():
    return make_optimizer(
        num_steps=CONFIG.num_steps, muon_learning_rate=0.02, adam_learning_rate=0.003
    )


@pytest.fixture(autouse=True)
def compile_once(monkeypatch, shared_optimizer):
    monkeypatch.setattr(train, "make_optimizer", lambda **kwargs: shared_optimizer)
    monkeypatch.setattr(train, "evaluate", lambda *args, **kwargs: [])


@pytest.mark.slow
def test_loss_falls_within_a_few_steps(tokenizer):
    batch = training_batch(tokenizer, seed=0, step=0)
    arrays = (batch.token_ids, batch.positions, batch.segment_ids, batch.is_answer)
    answer_loss = nnx.jit(train.answer_loss)
    before = answer_loss(DemoModel(TINY, rngs=nnx.Rngs(0)), *arrays)
    model, progress = train.train(tokenizer, TINY, CONFIG)
    assert progress.num_steps == CONFIG.num_steps
    assert progress.num_tokens > 0
    assert float(answer_loss(model, *arrays)) < float(before)


def test_interrupted_run_continues_where_it_stopped(tokenizer, tmp_path, monkeypatch):
    config = train.TrainingConfig(num_steps=4)

    def few_tokens(tokenizer, *, seed, step):
        batch = training_batch(tokenizer, seed=seed, step=step)
        fields = [field.name for field in dataclasses.fields(batch)]
        few = dataclasses.replace(batch, **{name: getattr(batch, name)[:2, :64] for name in fields})
        assert few.is_answer.any()
        return few

    def stop_at_step_3(tokenizer, *, seed, step):
        if step == 3:
            raise KeyboardInterrupt
        return few_tokens(tokenizer, seed=seed, step=step)

    monkeypatch.setattr(train, "training_batch", few_tokens)
    whole, _ = train.train(tokenizer, TINY, config)
    state_path = tmp_path / "state.npz"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(train, "training_batch", stop_at_step_3)
        train.train(tokenizer, TINY, config, state_path=state_path, save_every=2)
    resumed, progress = train.train(tokenizer, TINY, config, state_path=state_path, save_every=2)
    assert progress.num_steps == config.num_steps
    pairs = zip(jax.tree.leaves(nnx.state(whole)), jax.tree.leaves(nnx.state(resumed)), strict=True)
    for one, two in pairs:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
