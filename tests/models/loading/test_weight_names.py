"""Which checkpoint weight fills which parameter."""

from pathlib import Path

import pytest

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import StoredWeight
from models.loading.weight_names import WeightSource, check_weights, weight_source


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


def check(stored, wanted, *, tie_word_embeddings=False):
    check_weights(
        {
            name: StoredWeight(path=Path("w"), shape=shape, dtype=dtype)
            for name, (shape, dtype) in stored.items()
        },
        [WeightSource(name=name, shape=(2,), is_transposed=False) for name in wanted],
        tie_word_embeddings=tie_word_embeddings,
        where="here",
    )


def test_all_that_does_not_fit_is_named_at_once():
    fits = {"good": ((2,), "F32"), "x.rotary_emb.inv_freq": ((7,), "I8")}
    check(fits, ["good"])
    stored = fits | {"short": ((1,), "BF16"), "packed": ((2,), "I8"), "more": ((2,), "F32")}
    with pytest.raises(WeightMismatchError) as raised:
        check(stored, ["good", "short", "packed", "absent"])
    assert "here: " in str(raised.value) and " good" not in str(raised.value)
    for words in (
        "1 missing: absent.",
        "1 unexpected: more.",
        "1 of the wrong shape: short (got [1], wanted [2]).",
        "1 not of a dtype in F64, F32, F16, BF16: packed (I8).",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize(("num_weights", "end"), [(10, "w09."), (11, "w09 and 1 more.")])
def test_ten_of_a_kind_are_listed_and_the_rest_are_counted(num_weights, end):
    names = [f"w{number:02}" for number in range(num_weights)]
    with pytest.raises(WeightMismatchError, match=rf"{num_weights} missing: w00, .* {end}"):
        check({}, names)


def test_a_head_beside_a_tied_embedding_is_left_and_nothing_else():
    stored = {"lm_head.weight": ((2,), "F32")}
    check(stored, [], tie_word_embeddings=True)
    with pytest.raises(WeightMismatchError, match="unexpected: lm_head.weight"):
        check(stored, [])
    with pytest.raises(WeightMismatchError, match="1 unexpected: other"):
        check(stored | {"other": ((2,), "F32")}, [], tie_word_embeddings=True)
