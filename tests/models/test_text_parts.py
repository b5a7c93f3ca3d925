"""The language model of a checkpoint with a vision or an audio part answers as the whole does."""

import json
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np

from models import load_model, read_config
from models.errors import UnsupportedModelError
from models.text_parts import WHOLES, is_of_other_part, text_part
from tests.end_to_end.forward_check import forward_share_of_bound
from tests.oracles.wholes import CONFIGS, LOADED, architecture_of, make_whole

# Of these the normal suite compares logits: positions of several axes, turned experts, an index of
# tokens, and rows of gate and up that alternate. It loads the others, which finds every tensor;
# `test_parity.py` compares what their families compute.
COMPARED = ("inkling-vision", "mistral-large4", "qwen2.5-vl", "qwen3-vl-moe")


@pytest.mark.parametrize(
    "name",
    [name if name in COMPARED else pytest.param(name, marks=pytest.mark.slow) for name in LOADED],
)
def test_text_alone_has_the_logits_of_the_whole(name, tmp_path):
    start = time.process_time()
    share = forward_share_of_bound(name, tmp_path, 1)
    print(f"\n{name:20} {share:8.3f} of bound, {time.process_time() - start:4.1f} s of CPU time")
    assert json.loads((tmp_path / "config.json").read_text())["architectures"][0] in WHOLES


@pytest.mark.parametrize("name", [name for name in LOADED if name not in COMPARED])
def test_text_alone_has_the_weights_of_the_whole(name, tmp_path):
    language_model = make_whole(name, tmp_path, 1, is_sharp=False).get_decoder()
    loaded = load_model(tmp_path, dtype="float32")
    params = dict(zip(loaded.param_names, loaded.params, strict=True))
    # That of Llama 4 has a head.
    layers = getattr(language_model, "model", language_model).layers
    assert len(layers) == loaded.config.num_layers
    for layer_idx, layer in enumerate(layers):
        if hasattr(layer, "linear_attn"):
            projections = {"out_proj": layer.linear_attn.out_proj}
        else:
            # Gates have their rows in `q_proj`, too.
            is_gated = name.startswith(("qwen3.5", "qwen4"))
            names = ["o_proj"] if is_gated else ["q_proj", "o_proj"]
            projections = {leaf: getattr(layer.self_attn, leaf) for leaf in names}
        for leaf, projection in projections.items():
            got = params[f"layers.{layer_idx}.self_attn.{leaf}.kernel"]
            np.testing.assert_array_equal(got, projection.weight.detach().numpy().T)


def test_ngrams_end_at_the_end_token_of_the_text_part():
    """As in transformers, whose n-grams read `text_config`."""
    hf_config = json.loads(CONFIGS["qwen4-exp-vl"]().to_json_string(use_diff=False))
    hf_config["architectures"] = ["Qwen4ExpForConditionalGeneration"]
    hf_config["text_config"]["eos_token_id"] = 5
    for of_whole, ends in ((None, (5,)), (9, (9,)), ([9, 5], (9, 5))):
        config = read_config(hf_config | {"eos_token_id": of_whole})
        assert config.eos_token_ids == ends
        assert {ngrams.end_token_id for ngrams in filter(None, config.ngrams)} == {5}


def test_every_supported_whole_has_a_checkpoint():
    assert {architecture_of(CONFIGS[name]()) for name in LOADED} == set(WHOLES)


def test_the_page_of_models_names_all_of_them():
    page = (Path(__file__).parents[2] / "docs/guide/models.md").read_text(encoding="utf-8")
    assert [name for name in WHOLES if f"`{name}`" not in page] == []


def test_unsupported_wholes_are_refused_and_supported_ones_are_named():
    with pytest.raises(UnsupportedModelError, match="Gemma3ForConditionalGeneration"):
        read_config({"architectures": ["PaliGemmaForConditionalGeneration"]})


def test_fields_of_the_whole_win_and_older_configs_have_no_text_part():
    config = {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 64,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    part = text_part(config)
    assert (part["model_type"], part["hidden_size"]) == ("qwen2", 64)
    assert part["rope_scaling"] == {"type": "default"}
    nested = {"text_config": {"model_type": "gemma", "eos_token_id": 1}, "eos_token_id": [5]}
    ends = {"eos_token_id": [5], "text_eos_token_id": 1}
    assert text_part(nested) == {"model_type": "gemma"} | ends


def test_gemma_3_is_read_as_published_without_its_defaults():
    config = read_config(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "eos_token_id": [1, 106],
            "model_type": "gemma3",
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "model_type": "gemma3_text",
                "num_hidden_layers": 34,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                "sliding_window": 1024,
            },
        }
    )
    full = config.attention_layers[5]
    assert (config.vocab_size, config.num_layers, config.hidden_size) == (262_208, 34, 2560)
    assert (full.num_q_heads, full.num_kv_heads, full.head_dim) == (8, 4, 256)
    assert (full.rope.theta, full.rope.factor) == (1_000_000.0, 8.0)
    assert config.attention_layers[0].sliding_window == 1024


_FIELDS_AT_A_TIME = 8
# Sizes that are refused where they are missing, except for these types.
_WITH_DEFAULT_SIZES = ("gemma3_text", "llama", "mistral", "mistral_large4_text", "qwen2")
_ALWAYS_GIVEN = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
}
# `model_type` -> fields that have no default, in values that fit the defaults of the others.
_WITHOUT_DEFAULT = {
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 2048,
        "indexer_compress_ratio": 4,
    },
}


@pytest.mark.parametrize("name", LOADED)
def test_a_field_left_out_of_the_text_part_has_the_default_of_transformers(name):
    config = CONFIGS[name]()
    without_default = _WITHOUT_DEFAULT.get(config.text_config.model_type, {})
    text = json.loads(json.dumps(type(config.text_config)(**without_default).to_dict()))
    whole = config.to_dict() | {"architectures": [architecture_of(config)], "text_config": text}
    # Ids of tokens: published config.json files have them, and generation_config.json wins.
    kept = {"model_type", "bos_token_id", "eos_token_id", *without_default}
    if config.text_config.model_type not in _WITH_DEFAULT_SIZES:
        kept |= _ALWAYS_GIVEN
    expected = read_config(whole)

    def is_same_without(*fields: str) -> bool:
        rest = {key: value for key, value in text.items() if key not in fields}
        return read_config(whole | {"text_config": rest}) == expected

    wrong = []
    # Reading takes milliseconds per layer, so several fields are left out at the same time.
    left_out = sorted(set(text) - kept)
    for start in range(0, len(left_out), _FIELDS_AT_A_TIME):
        fields = left_out[start : start + _FIELDS_AT_A_TIME]
        if not is_same_without(*fields):
            wrong += [field for field in fields if not is_same_without(field)]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "is_other"),
    [
        ("vision_tower.layers.0.weight", True),
        ("model.visual.merger.weight", True),
        ("model.layers.0.mlp.up_proj.weight", False),
        ("language_model.model.embed_tokens.weight", False),
    ],
)
def test_tensors_of_other_parts_are_known_by_their_modules(name, is_other):
    assert is_of_other_part(name) == is_other
