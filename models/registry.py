"""Finds the class that runs the architecture of a config.json, in paxkv or in other packages."""

import dataclasses
import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from models.architecture_names import nearest_names, with_supported_names
from models.config.model_config import ModelConfig
from models.errors import ModelConfigError, ModelError, UnsupportedModelError
from models.model_impl import AUTO, load_model_impl
from models.text_parts import WHOLES, is_whole, text_part

if TYPE_CHECKING:
    from models.decoders.decoder import Decoder

# Installed packages add families by entry points of this group: architecture = "module:Class".
ENTRY_POINT_GROUP = "paxkv.models"

# The module is imported when a model of the family is loaded.
FAMILIES: dict[str, str] = {
    "LlamaForCausalLM": "models.families.llama:LlamaForCausalLM",
    "ExaoneForCausalLM": "models.families.exaone:ExaoneForCausalLM",
    "InternLM3ForCausalLM": "models.families.internlm3:InternLM3ForCausalLM",
    "IQuestCoderForCausalLM": "models.families.iquestcoder:IQuestCoderForCausalLM",
    "MistralForCausalLM": "models.families.mistral:MistralForCausalLM",
    "MixtralForCausalLM": "models.families.mixtral:MixtralForCausalLM",
    "Qwen2ForCausalLM": "models.families.qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "models.families.qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "models.families.qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "models.families.qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3VLMoeForCausalLM": "models.families.qwen3_vl_moe:Qwen3VLMoeForCausalLM",
    "Qwen3NextForCausalLM": "models.families.qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "models.families.qwen3_5:Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "models.families.qwen3_5_moe:Qwen3_5MoeForCausalLM",
    "Qwen4ExpForCausalLM": "models.families.qwen4_exp:Qwen4ExpForCausalLM",
    "Lfm2ForCausalLM": "models.families.lfm2:Lfm2ForCausalLM",
    "Lfm3ForCausalLM": "models.families.lfm3:Lfm3ForCausalLM",
    "Lfm2MoeForCausalLM": "models.families.lfm2_moe:Lfm2MoeForCausalLM",
    "NemotronHForCausalLM": "models.families.nemotron_h:NemotronHForCausalLM",
    "BailingHybridForCausalLM": "models.families.bailing_hybrid:BailingHybridForCausalLM",
    "KimiLinearForCausalLM": "models.families.kimi_linear:KimiLinearForCausalLM",
    "LaraMiniForCausalLM": "models.families.lara_mini:LaraMiniForCausalLM",
    "InklingForCausalLM": "models.families.inkling:InklingForCausalLM",
    "OlmoHybridForCausalLM": "models.families.olmo_hybrid:OlmoHybridForCausalLM",
    "FalconH1ForCausalLM": "models.families.falcon_h1:FalconH1ForCausalLM",
    "BambaForCausalLM": "models.families.bamba:BambaForCausalLM",
    "ZambaForCausalLM": "models.families.zamba:ZambaForCausalLM",
    "Zamba2ForCausalLM": "models.families.zamba2:Zamba2ForCausalLM",
    "ZayaForCausalLM": "models.families.zaya:ZayaForCausalLM",
    "RecurrentGemmaForCausalLM": ("models.families.recurrent_gemma:RecurrentGemmaForCausalLM"),
    "JambaForCausalLM": "models.families.jamba:JambaForCausalLM",
    "MambaForCausalLM": "models.families.mamba:MambaForCausalLM",
    "FalconMambaForCausalLM": "models.families.falcon_mamba:FalconMambaForCausalLM",
    "Mamba2ForCausalLM": "models.families.mamba2:Mamba2ForCausalLM",
    "OlmoeForCausalLM": "models.families.olmoe:OlmoeForCausalLM",
    "Olmo2ForCausalLM": "models.families.olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "models.families.olmo3:Olmo3ForCausalLM",
    "FlexOlmoForCausalLM": "models.families.flex_olmo:FlexOlmoForCausalLM",
    "GraniteForCausalLM": "models.families.granite:GraniteForCausalLM",
    "GraniteSWAForCausalLM": "models.families.granite_swa:GraniteSWAForCausalLM",
    "GraniteMoeForCausalLM": "models.families.granite_moe:GraniteMoeForCausalLM",
    "GraniteMoeSharedForCausalLM": "models.families.granite_moe:GraniteMoeSharedForCausalLM",
    "GraniteMoeHybridForCausalLM": (
        "models.families.granite_moe_hybrid:GraniteMoeHybridForCausalLM"
    ),
    "GraniteMoeSWAForCausalLM": "models.families.granite_moe_swa:GraniteMoeSWAForCausalLM",
    "JetMoeForCausalLM": "models.families.jetmoe:JetMoeForCausalLM",
    "SmolLM3ForCausalLM": "models.families.smollm3:SmolLM3ForCausalLM",
    "GlmForCausalLM": "models.families.glm:GlmForCausalLM",
    "Glm4ForCausalLM": "models.families.glm4:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "models.families.glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "models.families.glm4_moe_lite:Glm4MoeLiteForCausalLM",
    "DeepseekV3ForCausalLM": "models.families.deepseek_v3:DeepseekV3ForCausalLM",
    "DeepseekV2ForCausalLM": "models.families.deepseek_v2:DeepseekV2ForCausalLM",
    "SarvamMLAForCausalLM": "models.families.sarvam_mla:SarvamMLAForCausalLM",
    "Mistral4ForCausalLM": "models.families.mistral4:Mistral4ForCausalLM",
    "DeepseekV32ForCausalLM": "models.families.deepseek_v32:DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM": "models.families.glm_moe_dsa:GlmMoeDsaForCausalLM",
    "MistralLarge4ForCausalLM": "models.families.mistral_large4:MistralLarge4ForCausalLM",
    "AXK1ForCausalLM": "models.families.axk1:AXK1ForCausalLM",
    "AXK2ForCausalLM": "models.families.axk2:AXK2ForCausalLM",
    "LongcatFlashForCausalLM": "models.families.longcat_flash:LongcatFlashForCausalLM",
    "YoutuForCausalLM": "models.families.youtu:YoutuForCausalLM",
    "MiniCPM3ForCausalLM": "models.families.minicpm3:MiniCPM3ForCausalLM",
    "Dots1ForCausalLM": "models.families.dots1:Dots1ForCausalLM",
    "SolarOpenForCausalLM": "models.families.solar_open:SolarOpenForCausalLM",
    "SarvamMoEForCausalLM": "models.families.sarvam_moe:SarvamMoEForCausalLM",
    "MiniMaxForCausalLM": "models.families.minimax:MiniMaxForCausalLM",
    "MiniMaxM2ForCausalLM": "models.families.minimax_m2:MiniMaxM2ForCausalLM",
    "CohereForCausalLM": "models.families.cohere:CohereForCausalLM",
    "Cohere2ForCausalLM": "models.families.cohere2:Cohere2ForCausalLM",
    "Cohere2MoeForCausalLM": "models.families.cohere2_moe:Cohere2MoeForCausalLM",
    "CohereCompassForCausalLM": "models.families.cohere_compass:CohereCompassForCausalLM",
    "Exaone4ForCausalLM": "models.families.exaone4:Exaone4ForCausalLM",
    "ExaoneMoeForCausalLM": "models.families.exaone_moe:ExaoneMoeForCausalLM",
    "SeedOssForCausalLM": "models.families.seed_oss:SeedOssForCausalLM",
    "Ernie4_5ForCausalLM": "models.families.ernie4_5:Ernie4_5ForCausalLM",
    "Ernie4_5_MoeForCausalLM": "models.families.ernie4_5_moe:Ernie4_5_MoeForCausalLM",
    "Ministral3ForCausalLM": "models.families.ministral3:Ministral3ForCausalLM",
    "HunYuanDenseV1ForCausalLM": "models.families.hunyuan_v1_dense:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": "models.families.hunyuan_v1_moe:HunYuanMoEV1ForCausalLM",
    "HYV3ForCausalLM": "models.families.hy_v3:HYV3ForCausalLM",
    "OlmoForCausalLM": "models.families.olmo:OlmoForCausalLM",
    "Starcoder2ForCausalLM": "models.families.starcoder2:Starcoder2ForCausalLM",
    "Phi3ForCausalLM": "models.families.phi3:Phi3ForCausalLM",
    "PhimoeForCausalLM": "models.families.phimoe:PhimoeForCausalLM",
    "PhiForCausalLM": "models.families.phi:PhiForCausalLM",
    "NemotronForCausalLM": "models.families.nemotron:NemotronForCausalLM",
    "ArceeForCausalLM": "models.families.arcee:ArceeForCausalLM",
    "Jais2ForCausalLM": "models.families.jais2:Jais2ForCausalLM",
    "CwmForCausalLM": "models.families.cwm:CwmForCausalLM",
    "AfmoeForCausalLM": "models.families.afmoe:AfmoeForCausalLM",
    "LagunaForCausalLM": "models.families.laguna:LagunaForCausalLM",
    "MellumForCausalLM": "models.families.mellum:MellumForCausalLM",
    "Kolibri1ForCausalLM": "models.families.kolibri1:Kolibri1ForCausalLM",
    "BeamForCausalLM": "models.families.beam:BeamForCausalLM",
    "DbrxForCausalLM": "models.families.dbrx:DbrxForCausalLM",
    "DoryForCausalLM": "models.families.dory:DoryForCausalLM",
    "FlintForCausalLM": "models.families.flint:FlintForCausalLM",
    "GPT2LMHeadModel": "models.families.gpt2:GPT2LMHeadModel",
    "GPTBigCodeForCausalLM": "models.families.gpt_bigcode:GPTBigCodeForCausalLM",
    "GPTNeoXForCausalLM": "models.families.gpt_neox:GPTNeoXForCausalLM",
    "GPTJForCausalLM": "models.families.gptj:GPTJForCausalLM",
    "OPTForCausalLM": "models.families.opt:OPTForCausalLM",
    "BloomForCausalLM": "models.families.bloom:BloomForCausalLM",
    "FalconForCausalLM": "models.families.falcon:FalconForCausalLM",
    "MptForCausalLM": "models.families.mpt:MptForCausalLM",
    "ApertusForCausalLM": "models.families.apertus:ApertusForCausalLM",
    "Apertus1p5TextForCausalLM": "models.families.apertus1p5:Apertus1p5TextForCausalLM",
    "HeliumForCausalLM": "models.families.helium:HeliumForCausalLM",
    "NanoChatForCausalLM": "models.families.nanochat:NanoChatForCausalLM",
    "DiffLlamaForCausalLM": "models.families.diffllama:DiffLlamaForCausalLM",
    "DogeForCausalLM": "models.families.doge:DogeForCausalLM",
    "HyperCLOVAXForCausalLM": "models.families.hyperclovax:HyperCLOVAXForCausalLM",
    "GemmaForCausalLM": "models.families.gemma:GemmaForCausalLM",
    "VaultGemmaForCausalLM": "models.families.vaultgemma:VaultGemmaForCausalLM",
    "Gemma2ForCausalLM": "models.families.gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "models.families.gemma3:Gemma3ForCausalLM",
    "Gemma3nForCausalLM": "models.families.gemma3n:Gemma3nForCausalLM",
    "Gemma4ForCausalLM": "models.families.gemma4:Gemma4ForCausalLM",
    "Gemma4UnifiedForCausalLM": "models.families.gemma4_unified:Gemma4UnifiedForCausalLM",
    "StableLmForCausalLM": "models.families.stablelm:StableLmForCausalLM",
    "MiMoForCausalLM": "models.families.mimo:MiMoForCausalLM",
    "MiMoV2FlashForCausalLM": "models.families.mimo_v2:MiMoV2FlashForCausalLM",
    "Step3p5ForCausalLM": "models.families.step3p5:Step3p5ForCausalLM",
    "GptOssForCausalLM": "models.families.gpt_oss:GptOssForCausalLM",
    "Llama4ForCausalLM": "models.families.llama4:Llama4ForCausalLM",
    "MuseGlimmerForCausalLM": "models.families.muse_glimmer:MuseGlimmerForCausalLM",
    "MuseSparkForCausalLM": "models.families.muse_spark:MuseSparkForCausalLM",
}

# Architecture and model type that transformers 5 saves for a family -> its architecture on the hub.
_SAVED_AS_OTHERS = {
    ("LlamaForCausalLM", "exaone"): "ExaoneForCausalLM",
    ("LlamaForCausalLM", "internlm3"): "InternLM3ForCausalLM",
    ("LlamaForCausalLM", "iquestcoder"): "IQuestCoderForCausalLM",
    ("DeepseekV3ForCausalLM", "sarvam_mla"): "SarvamMLAForCausalLM",
    ("Glm4MoeForCausalLM", "sarvam_moe"): "SarvamMoEForCausalLM",
}


def read_config(hf_config: Mapping[str, object], *, model_impl: str = AUTO) -> ModelConfig:
    """Reads a config.json, as written by transformers 4 or 5.

    Args:
        model_impl: "auto" takes the class of the architecture, as `family_class` finds it.
            "module:Class" takes this class, whatever the architecture is.

    Raises:
        ModelConfigError: A field is missing, of the wrong type, or contradicts another.
        UnsupportedModelError: The model needs a feature that paxkv does not have.
        ModelError: `model_impl` names no model class.
    """
    if model_impl != AUTO:
        return _read_with(load_model_impl(model_impl), hf_config)
    entry_points = _entry_points()
    if is_whole(hf_config) and not set(hf_config["architectures"]) & set(entry_points):
        config = read_config(text_part(hf_config))
        return dataclasses.replace(config, has_other_parts=True)
    hf_config = with_supported_names(hf_config, [*FAMILIES, *entry_points])
    architecture = _read_architecture(hf_config)
    family = family_class(architecture, model_type=hf_config.get("model_type"))
    # Families of other packages may read `text_config`.
    if (
        architecture in FAMILIES
        and isinstance(hf_config.get("text_config"), Mapping)
        and hf_config.get("vocab_size") is None
    ):
        raise UnsupportedModelError(
            "config.json: text_config is present and vocab_size is missing, so it describes a "
            "multimodal model, whose text part is not read. Use a text-only checkpoint of this "
            "model."
        )
    return _read_with(family, {**hf_config, "architectures": [architecture]})


def family_class(
    architecture: str, *, model_impl: str = AUTO, model_type: object = None
) -> "type[Decoder]":
    """Returns the class of an architecture. Classes of paxkv win over other packages.

    Args:
        model_impl: As in `read_config`.
        model_type: From config.json; it helps to name similar architectures in an error.

    Raises:
        UnsupportedModelError: No class has this architecture, or it cannot be imported.
        ModelError: `model_impl` names no model class.
    """
    if model_impl != AUTO:
        return load_model_impl(model_impl)
    entry_points = _entry_points()
    if architecture in FAMILIES:
        entry_point = importlib.metadata.EntryPoint(
            architecture, FAMILIES[architecture], ENTRY_POINT_GROUP
        )
    elif architecture in entry_points:
        entry_point = entry_points[architecture]
    else:
        raise UnsupportedModelError(
            f"config.json: architecture {architecture!r} is not supported. "
            f"{_hint(architecture, model_type, [*FAMILIES, *entry_points])}"
        )
    try:
        return entry_point.load()
    except (ImportError, AttributeError) as error:
        raise UnsupportedModelError(
            f"config.json: architecture {architecture!r} needs {entry_point.value!r}, which cannot "
            f"be imported ({type(error).__name__}: {error}). Install the package that provides it "
            "again, or remove the package."
        ) from error


def _read_with(family: "type[Decoder]", hf_config: Mapping[str, object]) -> ModelConfig:
    names = hf_config.get("architectures")
    # A config.json of the user's own class may have no name of an architecture.
    names = names if isinstance(names, list) and names else [family.__name__]
    config = family.read_config({**hf_config, "architectures": names})
    if not isinstance(config, ModelConfig):
        raise ModelError(
            f"read_config of {family.__module__}.{family.__name__} returned "
            f"{type(config).__name__}; expected an object of "
            "models.config.model_config.ModelConfig, or of a class derived from it."
        )
    return config


@functools.cache
def _entry_points() -> dict[str, importlib.metadata.EntryPoint]:
    """Reads the metadata of all installed packages once, because that takes milliseconds."""
    found = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    return {entry_point.name: entry_point for entry_point in found}


def _hint(architecture: str, model_type: object, supported: Sequence[str]) -> str:
    """Says which architectures have similar names, and where to read more."""
    sentences = []
    if nearest := nearest_names((architecture, model_type), supported):
        sentences.append(f"Supported architectures with similar names: {', '.join(nearest)}.")
    if architecture.endswith("ForConditionalGeneration"):
        sentences.append(
            "Of checkpoints with a vision or an audio part, the language model is loaded only for "
            f"{', '.join(WHOLES)}."
        )
    sentences.append(
        f"docs/guide/models.md lists all {len(supported)} that are supported; "
        "docs/guide/adding-a-model.md describes how to add one."
    )
    return " ".join(sentences)


def _read_architecture(hf_config: Mapping[str, object]) -> str:
    architectures = hf_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise ModelConfigError(
            f"config.json: architectures is {_found(architectures)}; expected a list with the name "
            'of the architecture, such as ["LlamaForCausalLM"]. Use the config.json that was '
            "published with the weights. docs/guide/models.md lists the supported architectures."
        )
    architecture = str(architectures[0])
    return _SAVED_AS_OTHERS.get((architecture, hf_config.get("model_type")), architecture)


def _found(value: object) -> str:
    return "missing" if value is None else repr(value)
