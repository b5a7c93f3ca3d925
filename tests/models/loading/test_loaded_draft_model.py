"""A draft model must number tokens as its target does, and have no recurrent layers."""

import dataclasses
import json

import pytest

from models import ModelConfigError, UnsupportedModelError, load_model, read_model_config
from models.loading.loaded_draft_model import LoadedDraftModel, check_draft_model
from tests.small_engine import CHECKPOINT


def test_other_vocabulary_is_refused():
    model = load_model(CHECKPOINT, load_format="dummy").without_tokens([7])
    drafter = LoadedDraftModel.of_model(model, model)
    assert drafter.unused_token_ids == (7,) and not drafter.reads_hidden
    config = dataclasses.replace(model.config, vocab_size=model.config.vocab_size - 1)
    with pytest.raises(ModelConfigError, match="Use a draft model with the same tokenizer"):
        LoadedDraftModel.of_model(model, dataclasses.replace(model, config=config))


def test_recurrent_layers_are_refused(tmp_path):
    config = {"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 64}
    sizes = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    config = read_model_config(tmp_path)
    with pytest.raises(UnsupportedModelError, match="MambaForCausalLM, has recurrent layers"):
        check_draft_model(config, config)
