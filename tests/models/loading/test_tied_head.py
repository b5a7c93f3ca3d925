"""A head whose numbers differ from the embedding's is not tied, even if config.json says so."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from models.errors import WeightMismatchError
from models.families.llama import LlamaForCausalLM
from models.loading.load_model import load_model
from models.loading.tied_head import HEAD_WEIGHT
from models.registry import FAMILIES
from tests.oracles.make_checkpoint import write_random_checkpoint


def write_tied(folder, make_head):
    """A checkpoint whose config.json ties the head, which is stored all the same."""
    write_random_checkpoint(folder, tie=True, num_layers=1)
    weights = load_file(folder / "model.safetensors")
    weights[HEAD_WEIGHT] = make_head(weights["model.embed_tokens.weight"])
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return weights


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_equal_head_is_tied_unless_config_says_otherwise(tmp_path, caplog, dtype):
    write_tied(tmp_path, lambda embedding: embedding.astype(dtype))
    assert load_model(tmp_path).config.tie_word_embeddings
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    assert not load_model(tmp_path).config.tie_word_embeddings
    assert not caplog.records


def test_other_head_is_taken_as_it_is_stored_and_said(tmp_path, caplog):
    weights = write_tied(tmp_path, lambda embedding: embedding[::-1].copy())
    loaded = load_model(tmp_path)
    assert not loaded.config.tie_word_embeddings
    params = dict(zip(loaded.param_names, loaded.params, strict=True))
    np.testing.assert_array_equal(params["lm_head.kernel"], weights[HEAD_WEIGHT].T)
    np.testing.assert_array_equal(
        params["embed_tokens.embedding"], weights["model.embed_tokens.weight"]
    )
    assert "Set tie_word_embeddings to false" in caplog.text


@pytest.mark.parametrize("is_tied", [True, False])
def test_other_head_is_seen_where_the_embedding_has_another_name(tmp_path, monkeypatch, is_tied):
    weights = write_tied(
        tmp_path, lambda embedding: (embedding if is_tied else embedding[::-1]).copy()
    )
    renamed = {name.replace("model.", "transformer."): array for name, array in weights.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", f"{__name__}:RenamedLlama")
    loaded = load_model(tmp_path)
    assert loaded.config.tie_word_embeddings == is_tied
    logits = loaded.compute_logits(loaded.params, jnp.eye(64))
    np.testing.assert_allclose(logits, weights[HEAD_WEIGHT].T, rtol=1e-6)


class RenamedLlama(LlamaForCausalLM):
    """Its checkpoints say "transformer." in place of "model."."""

    def weight_rules(self):
        return {
            name: dataclasses.replace(
                rule,
                sources=tuple(
                    dataclasses.replace(s, name=s.name.replace("model.", "transformer."))
                    for s in rule.sources
                ),
            )
            for name, rule in super().weight_rules().items()
        }


@pytest.mark.parametrize(
    ("make_head", "message"),
    [
        (lambda embedding: embedding[:-1].copy(), r"lm_head\.weight \(has shape \[159, 64\]"),
        (lambda embedding: embedding.astype(np.int8), r"lm_head\.weight \(I8\)"),
    ],
)
def test_head_that_does_not_fit_is_named(tmp_path, make_head, message):
    write_tied(tmp_path, make_head)
    with pytest.raises(WeightMismatchError, match=message):
        load_model(tmp_path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_live_transformers_uses_the_same_head(tmp_path):
    make_golden = pytest.importorskip("tests.oracles.make_golden")  # needs torch and transformers
    weights = write_tied(tmp_path, lambda embedding: embedding[::-1].copy())
    head = make_golden.load_hf_model(tmp_path).lm_head.weight.numpy(force=True)
    np.testing.assert_array_equal(head, weights[HEAD_WEIGHT])
