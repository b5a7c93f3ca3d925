"""Checks that a checkpoint contains exactly the tensors that a model needs."""

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import StoredWeight
from models.weight_rule import Source

# Tensors in old checkpoints that are computed from config.json, and what Transformer Engine adds.
IGNORABLE_WEIGHTS = re.compile(
    r"rotary(_pos)?_emb\.(inv_freq|original_inv_freq|cos_cached|sin_cached)$"
    r"|(^|\.)position_ids$|\.masked_bias$|\._extra_state$"
)
# "self_attn.bias" is the causal mask of old checkpoints unless it is a vector.
_MASKS = re.compile(r"(attn|attention)\.bias$")
# Parts of multimodal models other than the language model, and heads for reinforcement learning.
_OTHER_PARTS = (
    *("vision_tower", "vision_model", "vision_encoder", "visual", "multi_modal_projector"),
    *("mm_projector", "image_newline", "embed_vision", "audio_tower", "embed_audio"),
    *("v_head", "value_head"),
)
# Parts of the names of tensors -> what their presence means and what to do.
_HINTS = {
    (".lora_A.", ".lora_B.", ".base_layer.", ".lora_embedding_A."): (
        "It contains a LoRA adapter that is not merged. Merge it (`merge_and_unload()` in PEFT) "
        "and save the model again."
    ),
    (".qweight", "_scale.", "_scale_inv.", ".absmax", ".weight_packed", "_blocks."): (
        "The weights are quantized, and quantization_config in config.json does not describe these "
        "tensors. Use the config.json that was published with the weights."
    ),
}
HEAD_WEIGHT = "lm_head.weight"
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
_INTEGER_DTYPES = ("I64", "I32")
MAX_LISTED = 10

logger = logging.getLogger(__name__)


def check_weights(
    stored: Mapping[str, StoredWeight],
    sources: Sequence[Source],
    *,
    ignored: Iterable[str] = (),
    where: str,
) -> None:
    """Compares the tensors of a checkpoint with the tensors that the model needs.

    Tensors of image and audio encoders, and of heads for reinforcement learning, are allowed. A
    warning names them.

    Args:
        stored: The tensors of the checkpoint by the names that weight rules have for them.
        ignored: Names of tensors that are allowed, besides `IGNORABLE_WEIGHTS`.
        where: The checkpoint, for the message.

    Raises:
        WeightMismatchError: Tensors are missing, unexpected, of another shape or not floating
            point. The message lists the first `MAX_LISTED` of each and counts the others.
    """
    wanted = {source.name for source in sources}
    integers = {source.name for source in sources if source.is_integer}
    others = {
        name
        for name in stored.keys() - wanted - set(ignored)
        if not _is_computed(name, stored[name])
    }
    other_parts = {name for name in others if _is_of_other_part(name)}
    if other_parts:
        logger.warning(
            "%s: paxkv runs the language model only and ignores %s",
            *(where, _describe("tensors of other parts", _stored_names(stored, other_parts))),
        )
    unexpected = _stored_names(stored, others - other_parts)
    present = wanted & stored.keys()
    # Several parameters may have parts of one source, and each of them has a shape for it.
    misshapen = [
        f"{stored[name].name} (has shape {list(stored[name].shape)}, needs {list(shape)})"
        for name, shape, others in sorted({(s.name, s.shape, s.other_shapes) for s in sources})
        if name in stored and stored[name].shape not in (shape, *others)
    ]
    unreadable = [
        f"{stored[name].name} ({stored[name].dtype})"
        for name in sorted(present)
        if stored[name].dtype not in READABLE_DTYPES and name not in integers
    ]
    not_integer = [
        f"{stored[name].name} ({stored[name].dtype})"
        for name in sorted(present & integers)
        if stored[name].dtype not in _INTEGER_DTYPES
    ]
    problems = {
        "missing": sorted(wanted - stored.keys()),
        "unexpected": unexpected,
        "of the wrong shape": misshapen,
        f"not of a dtype in {', '.join(READABLE_DTYPES)}": unreadable,
        f"not of a dtype in {', '.join(_INTEGER_DTYPES)}": not_integer,
    }
    parts = [_describe(label, names) for label, names in problems.items() if names]
    if parts:
        advice = _find_advice(problems["missing"], stored.values())
        raise WeightMismatchError(
            f"{where}: the weights do not fit config.json. {' '.join(parts)} {advice}"
        )


def _is_computed(name: str, weight: StoredWeight) -> bool:
    is_mask = _MASKS.search(name) is not None and len(weight.shape) != 1
    return is_mask or IGNORABLE_WEIGHTS.search(name) is not None


def _is_of_other_part(name: str) -> bool:
    return any(module in _OTHER_PARTS for module in name.split(".")[:2])


def _find_advice(missing: Sequence[str], stored: Collection[StoredWeight]) -> str:
    for parts, advice in _HINTS.items():
        if any(part in f"{weight.name}." for weight in stored for part in parts):
            return advice
    if HEAD_WEIGHT in missing:
        return (
            f"Without {HEAD_WEIGHT} the model has no vocabulary head: it may have been saved from "
            "the base class. Save it again with AutoModelForCausalLM; or, if the head is the "
            "embedding, set tie_word_embeddings to true in config.json."
        )
    return "Use config.json and weights of the same release."


def _stored_names(stored: Mapping[str, StoredWeight], names: Collection[str]) -> list[str]:
    return sorted(stored[name].name for name in names)


def _describe(label: str, names: Sequence[str]) -> str:
    listed = ", ".join(names[:MAX_LISTED])
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {label}: {listed}{rest}."
