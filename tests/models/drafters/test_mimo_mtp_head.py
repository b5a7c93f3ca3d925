"""MiMo computes what Qwen2 computes, and its head what the published code computes."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from models import UnsupportedModelError, load_model, read_config
from models.drafters.mimo_mtp_head import MiMoMTPHead
from models.drafters.mtp_heads import find_mtp_head
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_mtp_head
from tests.end_to_end.forward_check import share_of_bound
from tests.end_to_end.parity import largest_difference
from tests.models.drafters.head_stepper import HeadStepper
from tests.models.drafters.mimo_checkpoint import make_mimo

MAX_TOKENS = 24
# Tokens of the longer chunk.
WIDTH = 13


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mimo")
    return folder, *make_mimo(folder, seed=3)


def test_the_model_is_qwen2(checkpoint):
    folder, theirs, _ = checkpoint
    assert share_of_bound(theirs, folder, "mimo", 3) <= 1


def test_logits_of_the_head_are_those_of_the_published_code(checkpoint):
    """Of a prompt in two chunks, and of a draft that follows from the head's own hidden state."""
    folder, theirs, layer = checkpoint
    token_ids = np.random.RandomState(0).randint(2, 700, 21).tolist()
    read = []
    hook = theirs.model.norm.register_forward_pre_hook(lambda _, args: read.append(args[0][0]))
    with torch.no_grad(), hook:
        theirs(torch.tensor([token_ids[:20]]))
        embed = theirs.get_input_embeddings()
        rows = layer(embed(torch.tensor(token_ids[1:])), read[0])
        draft = int(theirs.lm_head(rows[-1]).argmax())
        embedded = embed(torch.tensor([*token_ids[1:], draft]))
        rows = layer(embedded, torch.cat([read[0], rows[-1:]]))
        wanted = theirs.lm_head(rows).numpy()
    loaded = load_model(folder, dtype="float32", max_model_len=MAX_TOKENS)
    head = load_mtp_head(loaded, folder, encoder=KernelEncoder(platform=loaded.platform))
    stepper = HeadStepper(loaded, head, max_tokens=MAX_TOKENS, width=WIDTH)
    found = []
    for start, end in ((0, WIDTH), (WIDTH, 20)):
        hidden = stepper.compute_hidden(token_ids[start:end], start)
        found.append(stepper.predict(token_ids[start + 1 : end + 1], hidden, start))
    assert stepper.choose(found[-1][-1:]) == [draft]
    found.append(stepper.predict([draft], found[-1][-1:], 20))
    logits = loaded.compute_logits(loaded.params, np.concatenate(found))
    assert np.abs(logits - wanted).max() <= largest_difference(float(np.abs(wanted).max()), 0.0)


def test_model_without_the_layer_has_no_head():
    """The field is missing in config.json of Qwen2, from which the published class derives."""
    fields = {"vocab_size": 400, "hidden_size": 64, "intermediate_size": 16}
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 32, "max_position_embeddings": 64}
    config = read_config({"architectures": ["MiMoForCausalLM"]} | fields | sizes)
    assert find_mtp_head(config) is MiMoMTPHead
    with pytest.raises(UnsupportedModelError, match="config.json has none"):
        MiMoMTPHead.config_of(config)
