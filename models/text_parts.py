"""Reads the language model of checkpoints that also have a vision or an audio part."""

import re
from collections.abc import Mapping

from models.config.fields import with_defaults

# Architectures of whole checkpoints whose language model is loaded. With text alone, they compute
# what the language model computes by itself.
WHOLES = (
    "Exaone4_5_ForConditionalGeneration",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "InklingForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Llama4ForConditionalGeneration",
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "MistralLarge4ForConditionalGeneration",
    "MuseGlimmerForConditionalGeneration",
    "MuseSparkForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen2AudioForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
    "Qwen4ExpForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Step3p7ForConditionalGeneration",
    "VoxtralForConditionalGeneration",
)
# `model_type` of a language model that has no class of its own -> its family's.
_MODEL_TYPES = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
_QWEN2_VL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1_000_000.0,
}
# `model_type` of a language model -> defaults of fields that its config.json may leave out, if its
# family has other defaults or none. transformers leaves out fields of a part that have the default:
# Gemma 3 4B was published without its vocabulary and its numbers of heads, and LLaVA 1.5 without
# its hidden size.
_DEFAULTS: dict[str, Mapping[str, object]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "inkling_text": {
        "vocab_size": 201_024,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 66,
        "num_attention_heads": 64,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 131_072,
    },
    "mistral_large4_text": {
        "vocab_size": 204_800,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 72,
        "num_attention_heads": 64,
        "max_position_embeddings": 1_048_576,
    },
    "qwen2": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 32_768,
    },
    "qwen2_vl": _QWEN2_VL_DEFAULTS,
    "qwen2_vl_text": _QWEN2_VL_DEFAULTS,
    "qwen2_5_vl": _QWEN2_VL_DEFAULTS,
    "qwen2_5_vl_text": _QWEN2_VL_DEFAULTS,
    "qwen3_vl_text": {"rope_theta": 500_000.0},
    "qwen3_vl_moe_text": {"rope_theta": 500_000.0},
}
# Fields of the whole that win over fields of its text part.
_SHARED_FIELDS = (
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "tie_word_embeddings",
    "torch_dtype",
)
# The text part's own `eos_token_id`, if the whole has another one. Answers end at the whole's.
TEXT_END = "text_eos_token_id"
# Modules for images and audio, and modules that pass their outputs to the language model.
_OTHER_MODULES = re.compile(
    r"(^|\.)(audio|audio_tower|connector|embed_audio|embed_vision|image_newline|multi_modal_projector"
    r"|patch_merger|pre_mm_projector_norm|vision_adapter|vision_encoder|vision_language_adapter"
    r"|vision_model|vision_projection|vision_tower|visual|vit_large_projector)(\.|$)"
)
# Positions in an image; with text alone, all axes have the same position.
_MROPE_FIELDS = ("mrope_section", "mrope_interleaved")


def is_whole(hf_config: Mapping[str, object]) -> bool:
    """Whether config.json describes one of `WHOLES`."""
    architectures = hf_config.get("architectures")
    return isinstance(architectures, list) and any(name in WHOLES for name in architectures)


def text_part(hf_config: Mapping[str, object]) -> dict[str, object]:
    """The config.json of the language model alone, without `architectures`.

    Older config.json files of Qwen2-VL and Qwen2.5-VL have its fields beside `vision_config`.
    """
    part = hf_config.get("text_config")
    fields = dict(part if isinstance(part, Mapping) else hf_config)
    own_end = fields.get("eos_token_id")
    fields |= {name: hf_config[name] for name in _SHARED_FIELDS if hf_config.get(name) is not None}
    if own_end is not None and own_end != fields["eos_token_id"]:
        fields[TEXT_END] = own_end
    fields.pop("architectures", None)
    # "vision" lets only the tokens of an image see later tokens (Gemma 4).
    if fields.get("use_bidirectional_attention") == "vision":
        del fields["use_bidirectional_attention"]
    model_type = str(fields.get("model_type", ""))
    fields = with_defaults(fields, _DEFAULTS.get(model_type, {}))
    fields["model_type"] = _MODEL_TYPES.get(model_type, model_type)
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(fields.get(name), Mapping):
            fields[name] = without_mrope(fields[name])
    return fields


def is_of_other_part(name: str) -> bool:
    """Whether a tensor of a checkpoint belongs to its vision or its audio part."""
    return _OTHER_MODULES.search(name) is not None


def without_mrope(fields: Mapping[str, object]) -> dict[str, object]:
    """Rope parameters without the axes of images: with text alone, all have equal positions."""
    rest = {name: value for name, value in fields.items() if name not in _MROPE_FIELDS}
    return {name: "default" if value == "mrope" else value for name, value in rest.items()}
