"""Which checkpoint weight fills which parameter."""

import pytest

from models.loading.weight_names import WeightSource, weight_source


@pytest.mark.parametrize(
    ("param_name", "shape", "expected"),
    [
        (
            "layers.10.mlp.up_proj.kernel",
            (64, 96),
            WeightSource(
                name="model.layers.10.mlp.up_proj.weight", shape=(96, 64), is_transposed=True
            ),
        ),
        (
            "layers.0.self_attn.q_proj.bias",
            (64,),
            WeightSource(
                name="model.layers.0.self_attn.q_proj.bias", shape=(64,), is_transposed=False
            ),
        ),
        (
            "embed_tokens.embedding",
            (160, 64),
            WeightSource(name="model.embed_tokens.weight", shape=(160, 64), is_transposed=False),
        ),
        (
            "norm.scale",
            (64,),
            WeightSource(name="model.norm.weight", shape=(64,), is_transposed=False),
        ),
        (
            "layers.3.pre_feedforward_layernorm.offset",
            (64,),
            WeightSource(
                name="model.layers.3.pre_feedforward_layernorm.weight",
                shape=(64,),
                is_transposed=False,
            ),
        ),
    ],
)
def test_parameter_finds_its_weight(param_name, shape, expected):
    assert weight_source(param_name, shape, tie_word_embeddings=False) == expected


def test_head_is_its_own_weight_or_the_embedding():
    untied = weight_source("lm_head.kernel", (64, 160), tie_word_embeddings=False)
    tied = weight_source("lm_head.kernel", (64, 160), tie_word_embeddings=True)
    assert (untied.name, tied.name) == ("lm_head.weight", "model.embed_tokens.weight")
    assert untied.shape == tied.shape == (160, 64)
