"""The heads for multi-token prediction compute what transformers computes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models import Wants, load_model
from models.decoder_spec import with_drafter
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_mtp_head
from paxkv.runner.memory.kv_cache_arrays import empty_kv_cache
from paxkv.runner.memory.kv_cache_groups import groups_of_spec
from paxkv.runner.programs.make_batch import make_batch
from tests.end_to_end.parity import largest_difference

NUM_TOKENS, BLOCK_SIZE = 24, 8


class Stepper:
    """One request over consecutive blocks: the target's hidden states, and a step of the head."""

    def __init__(self, folder):
        model = load_model(folder, dtype="float32", max_model_len=NUM_TOKENS)
        head = load_mtp_head(model, folder, encoder=KernelEncoder(platform=model.platform))
        spec = with_drafter(model.config.spec("float32"), head.config.spec("float32"))
        groups = groups_of_spec(spec, block_size=BLOCK_SIZE)
        places = groups.places(spec)
        self.model = model.with_places(places[:-1])
        self.head = head.with_places(places[-1:])
        self.tables = groups.tables(NUM_TOKENS)
        self.pages = empty_kv_cache(groups.config(1 + 3), model.platform, "float32")

    def batch(self, token_ids, start):
        num_tokens = len(token_ids)
        return make_batch(
            token_ids=jnp.array(token_ids, jnp.int32),
            positions=jnp.arange(start, start + num_tokens, dtype=jnp.int32),
            query_start_loc=jnp.array([0, num_tokens], jnp.int32),
            seq_lens=jnp.array([start + num_tokens], jnp.int32),
            block_tables=[
                jnp.broadcast_to(jnp.array([1, 2, 3], jnp.int32), (table.num_groups, 1, 3))
                for table in self.tables
            ],
            table_shapes=self.tables,
            logits_indices=jnp.zeros(1, jnp.int32),
            wants=Wants(logits="none", hidden="all"),
        )

    def compute_hidden(self, token_ids, start):
        forward = jax.jit(self.model.forward)
        outputs, self.pages = forward(self.model.params, self.pages, self.batch(token_ids, start))
        return outputs.hidden

    def predict(self, next_ids, hidden, start):
        """Hidden states and logits of the head."""
        embedded = self.model.embed(self.model.params, jnp.array(next_ids))
        run = jax.jit(self.head.run)
        hidden, self.pages = run(
            self.head.params,
            self.pages,
            self.batch(next_ids, start),
            embedded=embedded,
            hidden=hidden,
        )
        return hidden, self.model.compute_logits(self.model.params, hidden)


@pytest.fixture(scope="module", params=["deepseek-v3", "glm4-moe"])
def checkpoint(request, tmp_path_factory):
    from tests.oracles import families

    folder = tmp_path_factory.mktemp("mtp")
    model, _ = families.make_mtp(request.param, folder, seed=3)
    return type(model), folder


def test_logits_are_those_of_transformers(checkpoint):
    """Of a prompt in two chunks, and of a draft that follows from the head's own hidden state."""
    import torch
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    model_class, folder = checkpoint
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    token_ids = np.random.RandomState(0).randint(2, 700, 21).tolist()
    theirs = MtpModel.from_pretrained(model)
    cache = MtpCache(config=model.config.get_mtp_config())
    stepper = Stepper(folder)
    with torch.no_grad():
        outputs = model(torch.tensor([token_ids[:20]]), output_hidden_states=True)
        their_hidden = outputs.hidden_states[-1]
        differences = []
        for start, end in ((0, 13), (13, 20)):
            their_rows = theirs.forward_layer(
                0,
                their_hidden[:, start:end],
                torch.arange(start + 1, end + 1)[None],
                cache,
                input_ids=torch.tensor([token_ids[start + 1 : end + 1]]),
            )
            wanted = theirs._project_to_logits(their_rows)[0].numpy()
            hidden = stepper.compute_hidden(token_ids[start:end], start)
            rows, logits = stepper.predict(token_ids[start + 1 : end + 1], hidden, start)
            differences.append(np.abs(logits - wanted).max())
        draft = int(wanted[-1].argmax())
        choose = functools.partial(stepper.model.compute_logits, stepper.model.params)
        assert int(stepper.head.choose(stepper.head.params, rows[-1:], choose)[0]) == draft
        their_rows = theirs.forward_layer(
            0, their_rows[:, -1:], torch.tensor([[21]]), cache, input_ids=torch.tensor([[draft]])
        )
        last = theirs._project_to_logits(their_rows)[0].numpy()
    _, logits = stepper.predict([draft], rows[-1:], 20)
    differences.append(np.abs(logits - last).max())
    assert max(differences) <= largest_difference(float(np.abs(wanted).max()), 0.0)


def test_another_model_is_refused():
    from models.config.model_config import ModelConfig
    from models.drafters.mtp_head import mtp_config
    from models.errors import UnsupportedModelError

    fields = {field.name: None for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(**fields | {"architecture": "LlamaForCausalLM"})
    with pytest.raises(UnsupportedModelError, match="does not support LlamaForCausalLM"):
        mtp_config(config)
