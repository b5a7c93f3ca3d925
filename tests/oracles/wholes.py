"""Tiny random checkpoints with a vision or an audio part. paxkv loads their language models."""

import re
from pathlib import Path

import torch
import transformers
from safetensors.numpy import load_file, save_file

from tests.oracles import families

_Config = transformers.PreTrainedConfig
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model"}


def _make_config(name: str, text: dict[str, object], **fields: object) -> _Config:
    return getattr(transformers, name)(text_config=families._T | text, **fields)


def _make_llama4() -> _Config:
    """A layer with full attention too: chunks alone fill no pool."""
    families.MULTIMODAL["llama4-vision"][0]()
    name, fields = families._last
    text = {"num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]}
    return getattr(transformers, name)(**fields | {"text_config": fields["text_config"] | text})


def _make_gemma3n() -> _Config:
    # The vision tower of releases needs the package timm.
    tower = {"vocab_offset": families.VOCAB, "vocab_size": 16, "rms_norm_eps": 1e-6}
    config = transformers.Gemma3nConfig(
        text_config=families.FAMILIES["gemma3n"]().to_dict(),
        audio_config={
            "hidden_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "input_feat_size": 16,
            "vocab_offset": families.VOCAB + 16,
            "vocab_size": 16,
        },
    )
    # Its class in transformers refuses another tower.
    vars(config)["vision_config"] = transformers.SiglipVisionConfig(**_VISION, **tower)
    return config


def _make_mistral_small4() -> _Config:
    text = families.FAMILIES["mistral4"]().to_dict() | {"q_lora_rank": None}
    return transformers.Mistral3Config(
        text_config=text, vision_config=_VISION | {"model_type": "pixtral", "head_dim": 16}
    )


def _make_inkling() -> _Config:
    vision = {"num_hidden_layers": 1, "patch_size": 4}
    return transformers.InklingConfig(
        text_config=families.FAMILIES["inkling"]().to_dict(),
        vision_config=vision,
        audio_config={"n_mel_bins": 4, "mel_vocab_size": 8},
    )


# Names beside those of `families.MULTIMODAL`, or other checkpoints for them.
_MORE = {
    "gemma3n-vision": _make_gemma3n,
    "idefics3": lambda: _make_config(
        "Idefics3Config", {"model_type": "llama"}, vision_config=_VISION, scale_factor=2
    ),
    "inkling-vision": _make_inkling,
    "llama4-vision": _make_llama4,
    "llava-next": lambda: _make_config(
        "LlavaNextConfig", {"model_type": "mistral"}, vision_config=_SIGLIP
    ),
    "llava-onevision": lambda: _make_config(
        "LlavaOnevisionConfig", {"model_type": "qwen2"}, vision_config=_SIGLIP
    ),
    "mistral-small4": _make_mistral_small4,
    "qwen3.5-moe-vl": lambda: transformers.Qwen3_5MoeConfig(
        text_config=families.FAMILIES["qwen3.5-moe"]().to_dict(),
        vision_config=families._QV | {"num_position_embeddings": 64},
    ),
    "qwen4-exp-vl": lambda: transformers.Qwen4ExpConfig(
        text_config=families.FAMILIES["qwen4-exp-ple"]().to_dict(),
        vision_config=families._QV | {"num_position_embeddings": 64},
    ),
    "smolvlm": lambda: _make_config(
        "SmolVLMConfig", {"model_type": "llama"}, vision_config=_VISION, scale_factor=2
    ),
}
CONFIGS = {name: make for name, (make, _, _) in families.MULTIMODAL.items()} | _MORE
# Names in `CONFIGS`.
LOADED = (
    "exaone4.5",
    "gemma3-vision",
    "gemma3n-vision",
    "gemma4-unified",
    "gemma4-vision",
    "idefics3",
    "inkling-vision",
    "internvl",
    "llama4-vision",
    "llava-1.5",
    "llava-next",
    "llava-onevision",
    "mistral-small4",
    "mistral-large4",
    "mistral3",
    "muse-glimmer",
    "muse-spark",
    "pixtral-hf",
    "qwen2-audio",
    "qwen2-vl",
    "qwen2.5-vl",
    "qwen3-vl",
    "qwen3-vl-moe",
    "qwen3.5-moe-vl",
    "qwen3.5-vl",
    "qwen4-exp-vl",
    "smolvlm",
    "step3.5/3.7",
    "voxtral",
)


def architecture_of(config: _Config) -> str:
    """The class in transformers of a whole with this configuration."""
    return type(config).__name__.removesuffix("Config") + "ForConditionalGeneration"


def make_whole(name: str, folder: Path, seed: int, *, is_sharp: bool) -> torch.nn.Module:
    """Saves the whole checkpoint of that seed, and returns a model that computes its text.

    Args:
        is_sharp: As in `parity.make_checkpoint`.
    """
    torch.manual_seed(seed)
    config = CONFIGS[name]()
    for field in config.to_dict():
        # Some classes of transformers embed the tokens that stand for images as padding. They are
        # no text, and with these ids they are in no prompt.
        if re.search("_token_(id|index)$", field):
            setattr(config, field, families.VOCAB)
    model_class = getattr(transformers, architecture_of(config))
    whole = model_class._from_config(config, attn_implementation="eager").float().eval()
    families.seeded(whole, seed)
    # The class of Llama 4 in transformers cannot do without images.
    model = whole.language_model if name == "llama4-vision" else whole
    if is_sharp:
        model.generation_config = transformers.GenerationConfig(eos_token_id=None, pad_token_id=0)
        families.sharpen(model, seed)
    families.finish(whole, folder)
    if name == "qwen3-vl-moe":
        _turn_experts(folder / "model.safetensors")
    return model


def _turn_experts(path: Path) -> None:
    """Stores experts as the hub does. transformers turns them when it loads them."""
    tensors = {
        name: tensor.swapaxes(1, 2).copy() if ".mlp.experts." in name else tensor
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
