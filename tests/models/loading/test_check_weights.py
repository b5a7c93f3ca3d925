"""A checkpoint that does not fit the model is refused, with everything that is wrong."""

from pathlib import Path

import pytest

from models.errors import WeightMismatchError
from models.loading.check_weights import check_weights
from models.loading.safetensors_reader import StoredWeight
from models.weight_rule import Source


def check(stored, wanted, *, ignored=()):
    check_weights(
        {
            name: StoredWeight(path=Path("w"), name=name, shape=shape, dtype=dtype)
            for name, (shape, dtype) in stored.items()
        },
        [Source(name=name, shape=(2,)) for name in wanted],
        ignored=ignored,
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
        "1 of the wrong shape: short (has shape [1], needs [2]).",
        "1 not of a dtype in F64, F32, F16, BF16: packed (I8).",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize("shapes", [[(4,), (2,)], [(2,), (4,)]])
def test_every_parameter_of_a_shared_source_says_its_shape(shapes):
    stored = {"packed": StoredWeight(path=Path("w"), name="packed", shape=(4,), dtype="F32")}
    sources = [Source(name="packed", shape=shape) for shape in shapes]
    with pytest.raises(WeightMismatchError, match=r"packed \(has shape \[4\], needs \[2\]\)"):
        check_weights(stored, sources, where="here")


def test_shapes_of_other_software_fit():
    stored = {"part": StoredWeight(path=Path("w"), name="part", shape=(3,), dtype="F32")}
    check_weights(stored, [Source(name="part", shape=(4,), other_shapes=((3,),))], where="here")
    with pytest.raises(WeightMismatchError, match=r"part \(has shape \[3\], needs \[4\]\)"):
        check_weights(stored, [Source(name="part", shape=(4,), other_shapes=((2,),))], where="here")


@pytest.mark.parametrize(("num_weights", "end"), [(10, "w09."), (11, "w09 and 1 more.")])
def test_ten_of_a_kind_are_listed_and_the_rest_are_counted(num_weights, end):
    names = [f"w{number:02}" for number in range(num_weights)]
    with pytest.raises(WeightMismatchError, match=rf"{num_weights} missing: w00, .* {end}"):
        check({}, names)


def test_what_may_be_there_is_left_and_nothing_else():
    stored = {"lm_head.weight": ((2,), "F32")}
    check(stored, [], ignored=["lm_head.weight"])
    with pytest.raises(WeightMismatchError, match="unexpected: lm_head.weight"):
        check(stored, [])
    with pytest.raises(WeightMismatchError, match="1 unexpected: other"):
        check(stored | {"other": ((2,), "F32")}, [], ignored=["lm_head.weight"])


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.masked_bias",
        "transformer.h.0.attn.masked_bias",
        "model.layers.0.self_attn.bias",
        "gpt_neox.layers.0.attention.bias",
        "model.layers.0.mlp.up_proj._extra_state",
    ],
)
def test_tensors_that_are_computed_may_be_there(name):
    check({name: ((1, 1, 8, 8), "U8")}, [])


def test_a_vector_is_a_bias_and_not_a_causal_mask():
    with pytest.raises(WeightMismatchError, match=r"1 unexpected: transformer\.h\.0\.attn\.bias"):
        check({"transformer.h.0.attn.bias": ((8,), "F32")}, [])


def test_encoders_of_images_and_audio_are_ignored_with_a_warning(caplog):
    names = ["model.vision_tower.a", "model.visual.b", "audio_tower.c", "model.v_head.d"]
    check({name: ((3,), "F32") for name in names}, [])
    assert "ignores 4 tensors of other parts: audio_tower.c, model.v_head.d" in caplog.text
    with pytest.raises(WeightMismatchError, match="1 unexpected: model.layers.0.visual"):
        check({"model.layers.0.visual": ((3,), "F32")}, [])


@pytest.mark.parametrize(
    ("stored", "advice"),
    [
        ("model.layers.0.mlp.up_proj.lora_A.default.weight", "LoRA adapter that is not merged"),
        ("model.layers.0.mlp.up_proj.base_layer.weight", "LoRA adapter that is not merged"),
        ("model.layers.0.mlp.up_proj.qweight", "The weights are quantized"),
        ("model.layers.0.mlp.experts.down_proj_blocks", "The weights are quantized"),
        ("model.layers.0.mlp.up_proj.weight_scale_inv", "The weights are quantized"),
        ("more", "of the same release"),
    ],
)
def test_advice_depends_on_the_unexpected_tensors(stored, advice):
    with pytest.raises(WeightMismatchError, match=advice):
        check({stored: ((2,), "F32")}, ["absent"])


def test_a_missing_head_is_explained():
    with pytest.raises(WeightMismatchError, match="saved from the base class.*tie_word_embeddings"):
        check({"norm": ((2,), "F32")}, ["norm", "lm_head.weight"])
