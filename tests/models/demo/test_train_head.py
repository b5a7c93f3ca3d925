"""The draft head of the demo model: its training, and the head that is shipped."""

import jax
import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from models import load_model
from models.demo import train_head
from models.demo.batches import training_batch
from models.demo.data import addition_turn
from models.demo.generation import render_question
from models.demo.head_model import HeadConfig, HeadModel
from models.demo.paxkv_questions import TAUGHT_ANSWERS
from models.demo.tokenizer_training import TURN_END, train_tokenizer
from models.demo.training_model import DemoModel, DemoModelConfig
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_eagle3_head
from tests.models.drafters.head_stepper import HeadStepper
from tests.small_engine import CHECKPOINT

SHIPPED = CHECKPOINT.parent / "draft_head"
TINY = DemoModelConfig(
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
)
TINY_HEAD = HeadConfig(layer_ids=(1, 2), draft_vocab_size=32, intermediate_size=8)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(seed=0, vocab_size=TINY.vocab_size, num_conversations=300)


@pytest.mark.slow
def test_loss_falls_within_a_few_steps(tokenizer):
    target = DemoModel(TINY, rngs=nnx.Rngs(0))
    draft_ids_np = train_head.find_draft_ids(tokenizer, TINY_HEAD.draft_vocab_size, seed=0)
    assert np.all(np.diff(draft_ids_np) > 0)
    batch = train_head.as_arrays(training_batch(tokenizer, seed=0, step=0))
    row = tuple(array_np[:2, :64] for array_np in batch)
    graphdef, params = nnx.split(
        HeadModel(TINY_HEAD, target, draft_ids_np, rngs=nnx.Rngs(0)), nnx.Param
    )

    @jax.jit
    def step(params):
        loss, grads = jax.value_and_grad(
            lambda p: train_head.head_loss(nnx.merge(graphdef, p), target, draft_ids_np, row)
        )(params)
        return loss, jax.tree.map(lambda param, grad: param - 0.2 * grad, params, grads)

    losses = []
    for _ in range(8):
        loss, params = step(params)
        losses.append(float(loss))
    assert losses[-1] < 0.95 * losses[0]


def test_shipped_head_drafts_what_the_model_writes():
    """Compares drafts at every second token of right answers, which may be new to the head."""
    assert (SHIPPED / "model.safetensors").stat().st_size <= 400_000
    model = load_model(CHECKPOINT, dtype="float32")
    head = load_eagle3_head(model, SHIPPED, encoder=KernelEncoder(platform=model.platform))
    stepper = HeadStepper(model, head, max_tokens=64, width=64)
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    turns = [addition_turn(23, 58), addition_turn(71, 9)]
    texts = [(render_question(turn.question), turn.answer) for turn in turns]
    texts += [
        (render_question(taught.questions[0]), taught.answer) for taught in TAUGHT_ANSWERS[:3]
    ]
    num_right, num_all = np.zeros(3), 0
    for prompt, answer in texts:
        start = len(tokenizer.encode(prompt).ids)
        token_ids = tokenizer.encode(prompt + answer + TURN_END).ids
        for end in range(start + 1, len(token_ids) - 2, 2):
            wanted_np = np.asarray(token_ids[end : end + 3])
            drafts = stepper.drafts(token_ids[:end], 3)
            num_right += np.cumprod(wanted_np == drafts)
            num_all += 1
    shares = num_right / num_all
    assert num_all > 40
    assert shares[0] > 0.6 and shares[2] > 0.35, shares
