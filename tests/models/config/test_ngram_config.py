"""The numbers of hashes of n-grams are those of transformers, and some fields are refused."""

import pytest

from models.config.ngram_config import read_ngrams
from models.errors import ModelConfigError, UnsupportedModelError

FIELDS = {
    "hidden_size": 32,
    "vocab_size": 248_320,
    "eos_token_id": [7, 9],
    "ple_layer_ids": [1, 3],
    "ple_embed_dim": 48,
    "ngram_size": 4,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 64,
    "split_ngram_parts": 4,
    "seed": 99,
}
HAS_STATE = (True, False, True)


def test_sizes_and_multipliers_are_those_of_transformers():
    pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen4_exp.modeling_qwen4_exp")
    layer_types = ["linear_attention", "indexed_attention", "linear_attention"]
    config = modeling.Qwen4ExpTextConfig(num_hidden_layers=3, layer_types=layer_types, **FIELDS)
    ngrams = read_ngrams(FIELDS, HAS_STATE, num_streams=2)
    assert ngrams[1] is None
    for idx, ours in enumerate((ngrams[0], ngrams[2])):
        theirs = modeling.Qwen4ExpTextNGramEmbedding(config, 48, 2 * idx, idx)
        assert list(ours.multipliers) == theirs.layer_multipliers.tolist()
        assert list(ours.head_sizes) == theirs.ngram_heads_vocab_sizes.tolist()
        assert (ours.num_rows, ours.head_dim) == tuple(theirs.ngram_embedding.weight.shape)
        assert (ours.end_token_id, ours.embed_dim) == (theirs.eos_token_id, 48)
        # Three inputs back, each at a distance of four tokens, and three token ids.
        assert ours.format().shapes == ((12, 64), (3, 3))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"ple_layer_ids": [0]}, ModelConfigError, r"ple_layer_ids is \[0\]; .* from 1 to 3"),
        ({"ple_layer_ids": [4]}, ModelConfigError, r"ple_layer_ids is \[4\]; .* from 1 to 3"),
        ({"ple_layer_ids": [2]}, UnsupportedModelError, r"ple_layer_ids is \[2\], .* attention"),
        ({"eos_token_id": None}, ModelConfigError, "eos_token_id is missing"),
        ({"ple_embed_dim": 50}, ModelConfigError, "ple_embed_dim is 50; expected a multiple of 6"),
        ({"vocab_size": 2**24}, UnsupportedModelError, "fewer than 16777216 tokens"),
        ({"ngram_vocab_size_base": 4 * 10**8}, UnsupportedModelError, "supports fewer than 21474"),
        # The base fits, and the padded rows do not.
        ({"ngram_vocab_size_base": 357_913_931}, UnsupportedModelError, "give a layer 2147483840"),
        ({"ngram_vocab_size_base": 10**40}, UnsupportedModelError, "supports fewer than 21474"),
    ],
)
def test_fields_that_do_not_fit_are_refused(changes, error, message):
    with pytest.raises(error, match=message):
        read_ngrams(FIELDS | changes, HAS_STATE, num_streams=2)
