"""Names of architectures: of base classes, in other letters, older ones, and none."""

import pytest

from models.architecture_names import nearest_names, with_supported_names
from models.registry import FAMILIES

SUPPORTED = (*FAMILIES, "GPT2LMHeadModel", "Ernie4_5ForCausalLM")


def architecture_of(*names: object, **fields: object) -> object:
    hf_config = {"architectures": list(names)} if names else {}
    found = with_supported_names({**hf_config, **fields}, SUPPORTED).get("architectures")
    return found[0] if isinstance(found, list) and len(found) == 1 else found


@pytest.mark.parametrize(
    ("name", "supported"),
    [
        ("LLaMAForCausalLM", "LlamaForCausalLM"),
        ("LlamaModel", "LlamaForCausalLM"),
        ("FSDPLlamaForCausalLM", "LlamaForCausalLM"),
        ("Gemma3TextModel", "Gemma3ForCausalLM"),
        ("Llama4TextModel", "Llama4ForCausalLM"),
        ("MiMoV2FlashModel", "MiMoV2FlashForCausalLM"),
        ("GPT2Model", "GPT2LMHeadModel"),
        ("AquilaModel", "LlamaForCausalLM"),
        ("XverseForCausalLM", "LlamaForCausalLM"),
        ("InternLMForCausalLM", "LlamaForCausalLM"),
        ("StableLMEpochForCausalLM", "StableLmForCausalLM"),
    ],
)
def test_other_names_of_an_architecture_are_known(name, supported):
    assert architecture_of(name) == supported


@pytest.mark.parametrize("architecture", FAMILIES)
def test_names_of_today_stay(architecture):
    fields = {"architectures": [architecture], "rope_pct": 1, "bias": True}
    assert with_supported_names(fields, SUPPORTED) == fields


@pytest.mark.parametrize(
    "name",
    [
        "LlamaForSequenceClassification",
        "LlamaForTokenClassification",
        "Llama4ForConditionalGeneration",
        "Qwen3ForQuestionAnswering",
        "BertModel",
    ],
)
def test_other_tasks_and_models_are_not_taken_for_it(name):
    assert architecture_of(name, model_type="llama") == name


@pytest.mark.parametrize(
    ("model_type", "supported"),
    [
        ("llama", "LlamaForCausalLM"),
        ("qwen3_moe", "Qwen3MoeForCausalLM"),
        ("gemma3_text", "Gemma3ForCausalLM"),
        ("minimax_m2", "MiniMaxM2ForCausalLM"),
        ("mimo_v2_flash", "MiMoV2FlashForCausalLM"),
        ("ernie4_5", "Ernie4_5ForCausalLM"),
        ("bert", None),
        (7, None),
        (None, None),
    ],
)
def test_model_type_decides_without_a_name(model_type, supported):
    assert architecture_of(model_type=model_type) == supported
    wrapper = architecture_of("PeftModelForCausalLM", model_type=model_type)
    assert wrapper == (supported or "PeftModelForCausalLM")
    assert architecture_of(None, model_type=model_type) == supported


def test_the_first_supported_of_several_names_counts():
    assert architecture_of("MyOwnForCausalLM", "Qwen3Model") == "Qwen3ForCausalLM"


def test_a_class_of_the_older_name_itself_wins():
    found = with_supported_names({"architectures": ["AquilaModel"]}, ("AquilaModel",))
    assert found["architectures"] == ["AquilaModel"]


def test_fields_of_older_names_are_renamed():
    old = {"architectures": ["StableLMEpochForCausalLM"], "norm_eps": 1e-3, "rope_pct": 0.5}
    renamed = with_supported_names(old, SUPPORTED)
    assert (renamed["layer_norm_eps"], renamed["partial_rotary_factor"]) == (1e-3, 0.5)
    for both in (old | {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25} | old):
        assert with_supported_names(both, SUPPORTED)["partial_rotary_factor"] == 0.25
    biased = with_supported_names(
        {"architectures": ["InternLMForCausalLM"], "bias": True}, SUPPORTED
    )
    assert biased["attention_bias"] is True


@pytest.mark.parametrize(
    ("names", "nearest"),
    [
        (("MistralForSequenceClassification", ""), "MistralForCausalLM"),
        (("Gemma3ForConditionalGeneration", "gemma3"), "Gemma3ForCausalLM"),
        (("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl"), "Qwen2ForCausalLM"),
        # The name says nothing, the type does.
        (("MyModel", "starcoder2"), "Starcoder2ForCausalLM"),
    ],
)
def test_the_most_similar_architecture_comes_first(names, nearest):
    found = nearest_names(names, tuple(FAMILIES))
    assert found[0] == nearest
    assert len(found) <= 3


@pytest.mark.parametrize("names", [("BertModel", "bert"), ("ForCausalLM", None), ("", 7)])
def test_names_without_a_similar_one_have_none(names):
    assert nearest_names(names, tuple(FAMILIES)) == []
