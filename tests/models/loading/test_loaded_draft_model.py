"""A draft model must number tokens as its target does."""

import dataclasses
import json

import pytest

from models import ModelConfigError, load_model
from models.loading.loaded_draft_model import LoadedDraftModel
from tests.small_engine import CHECKPOINT


def test_other_vocabulary_is_refused():
    model = load_model(CHECKPOINT, load_format="dummy").without_tokens([7])
    drafter = LoadedDraftModel.of_model(model, model)
    assert drafter.unused_token_ids == (7,) and not drafter.reads_hidden
    config = dataclasses.replace(model.config, vocab_size=model.config.vocab_size - 1)
    with pytest.raises(ModelConfigError, match="Use a draft model with the same tokenizer"):
        LoadedDraftModel.of_model(model, dataclasses.replace(model, config=config))


@pytest.mark.parametrize(
    ("fields", "has_states"),
    [
        ({"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4}, False),
        ({"architectures": ["MambaForCausalLM"], "state_size": 8}, True),
    ],
)
def test_recurrent_layers_have_states(tmp_path, fields, has_states):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    sizes["max_position_embeddings"] = 64
    (tmp_path / "config.json").write_text(json.dumps(fields | sizes))
    model = load_model(tmp_path, load_format="dummy")
    assert LoadedDraftModel.of_model(model, model).has_states == has_states
