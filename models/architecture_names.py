"""Finds the supported architecture that a config.json describes, under any of its names."""

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

# Endings of the names of one architecture: with a vocabulary head; without (the base class, which
# `save_pretrained` writes for a model that AutoModel loaded); and of `model_type`.
_ENDINGS = re.compile(r"((Text)?ForCausalLM|LMHeadModel|(Text)?Model|_text)$")
# The end of a class's name if the class computes something other than the next token.
_HEADS = re.compile(r"For[A-Z]\w*$")
# The least similarity of two names; below it, similar letters do not mean similar models.
_MIN_SIMILARITY, _MAX_NEAREST = 0.6, 3
# Names that training frameworks write for any architecture; `model_type` says which one it is.
_WRAPPERS = ("AutoModelForCausalLM", "PeftModelForCausalLM", "PeftModel")


class _OlderName(NamedTuple):
    """A name from the time before transformers had the architecture."""

    architecture: str
    fields: Mapping[str, str]  # name of a field in the older config.json -> its name today


_OLDER_NAMES = {
    "AquilaForCausalLM": _OlderName("LlamaForCausalLM", {}),
    "AquilaModel": _OlderName("LlamaForCausalLM", {}),
    "InternLMForCausalLM": _OlderName("LlamaForCausalLM", {"bias": "attention_bias"}),
    "XverseForCausalLM": _OlderName("LlamaForCausalLM", {}),
    "StableLMEpochForCausalLM": _OlderName(
        "StableLmForCausalLM",
        {"norm_eps": "layer_norm_eps", "rope_pct": "partial_rotary_factor"},
    ),
    "JetMoEForCausalLM": _OlderName(
        "JetMoeForCausalLM",
        {
            "ffn_hidden_size": "intermediate_size",
            "moe_num_experts": "num_local_experts",
            "moe_top_k": "num_experts_per_tok",
            "n_positions": "max_position_embeddings",
        },
    ),
}


def with_supported_names(
    hf_config: Mapping[str, object], supported: Sequence[str]
) -> dict[str, object]:
    """Replaces older and other names in a config.json.

    `architectures` becomes a list of one name: the first that is supported under this or another
    name. Names may differ in upper and lower case, and may be names of base classes: "LlamaModel"
    and "LLaMAForCausalLM" are "LlamaForCausalLM". `model_type` decides if there is no name. The
    config.json stays as it is if no name is supported.

    Args:
        supported: Names of architectures. The first wins if several differ only as above.
    """
    names = hf_config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    names = [name for name in names if name not in _WRAPPERS] or [hf_config.get("model_type")]
    by_core: dict[str, str] = {}
    for name in supported:
        by_core.setdefault(_core_of(name), name)
    for name in filter(None, map(_as_text, names)):
        older = _OLDER_NAMES.get(name)
        if older is not None and name not in supported:
            renamed = {older.fields.get(field, field): v for field, v in hf_config.items()}
            # If a field has both names, its name of today counts.
            return {**renamed, **hf_config, "architectures": [older.architecture]}
        found = name if name in supported else by_core.get(_core_of(name))
        if found is not None:
            return {**hf_config, "architectures": [found]}
    return dict(hf_config)


def nearest_names(names: Sequence[object], supported: Sequence[str]) -> list[str]:
    """At most three of `supported`, whose names are like one of `names`; the most similar first.

    Endings such as "ForCausalLM" do not count.

    Args:
        names: Of a model that is not supported: its architecture and its `model_type`. Values other
            than strings are skipped.
    """
    wanted = {_core_of(_HEADS.sub("", name)) for name in names if isinstance(name, str)} - {""}
    scores = {
        name: max(
            (difflib.SequenceMatcher(None, core, _core_of(name)).ratio() for core in wanted),
            default=0.0,
        )
        for name in supported
    }
    similar = [name for name, score in scores.items() if score >= _MIN_SIMILARITY]
    return sorted(similar, key=scores.__getitem__, reverse=True)[:_MAX_NEAREST]


def _as_text(name: object) -> str:
    return name.removeprefix("FSDP") if isinstance(name, str) else ""


def _core_of(name: str) -> str:
    """What the names of one architecture share: "llama" in "LLaMAForCausalLM" and "LlamaModel"."""
    return re.sub("[^a-z0-9]", "", _ENDINGS.sub("", name).lower())
