"""A draft model must number tokens as its target does."""

import dataclasses

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
