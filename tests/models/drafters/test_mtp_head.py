"""The heads for multi-token prediction compute what transformers computes."""

import dataclasses
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models import UnsupportedModelError, load_model
from models.drafters.mtp_head import MTPHead
from models.drafters.mtp_heads import find_mtp_head
from models.loading.kernel_encoder import KernelEncoder
from models.loading.load_head import load_mtp_head
from tests.end_to_end.parity import largest_difference
from tests.models.drafters.head_stepper import HeadStepper

SEED = 3
MAX_TOKENS = 24
# Tokens of the longer chunk.
WIDTH = 13


# `test_parity.py` compares the layers of all these families, so one family for each class of heads
# is in the normal run.
@pytest.fixture(
    scope="module",
    params=[
        "deepseek-v3",
        "qwen3.5",
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("glm4-moe", "qwen3-next", "qwen3.5-moe")
        ),
    ],
)
def checkpoint(request, tmp_path_factory):
    from tests.oracles import families

    folder = tmp_path_factory.mktemp("mtp")
    model, _ = families.make_mtp(request.param, folder, seed=SEED)
    return type(model), folder


def test_logits_are_those_of_transformers(checkpoint):
    """Of a prompt in two chunks, and of a draft that follows from the head's own hidden state."""
    import torch
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

    from tests.oracles import families

    model_class, folder = checkpoint
    model = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    loaded = load_model(folder, dtype="float32", max_model_len=MAX_TOKENS)
    token_ids = np.random.RandomState(0).randint(2, 700, 21).tolist()
    # transformers does not load the tensors of Qwen's head.
    is_qwen = find_mtp_head(loaded.config) is not MTPHead
    theirs = families.mtp_of(model, SEED) if is_qwen else MtpModel.from_pretrained(model)
    cache = MtpCache(config=model.config.get_mtp_config())
    head = load_mtp_head(loaded, folder, encoder=KernelEncoder(platform=loaded.platform))
    stepper = HeadStepper(loaded, head, max_tokens=MAX_TOKENS, width=WIDTH)
    with torch.no_grad():
        outputs = model(torch.tensor([token_ids[:20]]), output_hidden_states=True)
        their_hidden = outputs.hidden_states[-1]
        differences = []
        for start, end in ((0, WIDTH), (WIDTH, 20)):
            their_rows = theirs.forward_layer(
                0,
                their_hidden[:, start:end],
                torch.arange(start + 1, end + 1)[None],
                cache,
                input_ids=torch.tensor([token_ids[start + 1 : end + 1]]),
            )
            wanted = theirs._project_to_logits(their_rows)[0].numpy()
            hidden = stepper.compute_hidden(token_ids[start:end], start)
            rows = stepper.predict(token_ids[start + 1 : end + 1], hidden, start)
            logits = loaded.compute_logits(loaded.params, rows)
            differences.append(np.abs(logits - wanted).max())
        draft = int(wanted[-1].argmax())
        assert stepper.choose(rows[-1:]) == [draft]
        their_rows = theirs.forward_layer(
            0, their_rows[:, -1:], torch.tensor([[21]]), cache, input_ids=torch.tensor([[draft]])
        )
        last = theirs._project_to_logits(their_rows)[0].numpy()
    logits = loaded.compute_logits(loaded.params, stepper.predict([draft], rows[-1:], 20))
    differences.append(np.abs(logits - last).max())
    assert max(differences) <= largest_difference(float(np.abs(wanted).max()), 0.0)


def test_another_model_is_refused():
    from models.config.model_config import ModelConfig

    fields = {field.name: None for field in dataclasses.fields(ModelConfig)}
    config = ModelConfig(**fields | {"architecture": "LlamaForCausalLM"})
    with pytest.raises(UnsupportedModelError, match="does not support LlamaForCausalLM"):
        find_mtp_head(config)


def test_checkpoint_without_the_layer_is_refused(checkpoint, tmp_path):
    """Some published copies keep the field of config.json, but not the tensors."""
    _, folder = checkpoint
    shutil.copy(folder / "config.json", tmp_path)
    model = load_model(folder, dtype="float32")
    prefix = find_mtp_head(model.config).prefix_of(model.config)
    weights = {
        name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if not name.startswith(prefix)
    }
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    encoder = KernelEncoder(platform=model.platform)
    with pytest.raises(UnsupportedModelError, match=rf"method 'mtp' needs the tensors {prefix}\*"):
        load_mtp_head(model, tmp_path, encoder=encoder)
