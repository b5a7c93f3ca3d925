"""Which checkpoint weight fills which parameter, and the check that the two sides fit."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import StoredWeight

# Last part of a parameter's name -> last part of the weight's.
LEAF_NAMES = {
    "kernel": "weight",
    "embedding": "weight",
    "scale": "weight",
    "offset": "weight",
    "bias": "bias",
}
EMBEDDING_WEIGHT = "model.embed_tokens.weight"
HEAD_WEIGHT = "lm_head.weight"
# Left in old checkpoints: constants that are computed from the config.
IGNORABLE_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|self_attn\.masked_bias$|self_attn\.bias$")
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_LISTED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSource:
    """The checkpoint weight that fills one parameter."""

    name: str
    shape: tuple[int, ...]  # as stored
    is_transposed: bool  # stored [out, in], wanted [in, out]


def weight_source(
    param_name: str, param_shape: tuple[int, ...], *, tie_word_embeddings: bool
) -> WeightSource:
    """Names the weight for a parameter.

    "layers.0.mlp.up_proj.kernel" -> "model.layers.0.mlp.up_proj.weight", transposed
    "norm.scale"                  -> "model.norm.weight"
    "lm_head.kernel"              -> "lm_head.weight" transposed; the embedding where tied
    """
    module_name, _, leaf = param_name.rpartition(".")
    if module_name == "lm_head":
        name = EMBEDDING_WEIGHT if tie_word_embeddings else HEAD_WEIGHT
    else:
        name = f"model.{module_name}.{LEAF_NAMES[leaf]}"
    is_transposed = leaf == "kernel"
    shape = param_shape[::-1] if is_transposed else param_shape
    return WeightSource(name=name, shape=shape, is_transposed=is_transposed)


def check_weights(
    stored: Mapping[str, StoredWeight],
    sources: Sequence[WeightSource],
    *,
    tie_word_embeddings: bool,
    where: str,
) -> None:
    """Compares what a checkpoint holds with what the model wants.

    Args:
        where: Names the checkpoint in the message.

    Raises:
        WeightMismatchError: Weights are missing, unexpected, misshapen or not floating point. The
        message
            lists the first `MAX_LISTED` of each and counts the rest.
    """
    wanted = {source.name: source for source in sources}
    unexpected = [
        name
        for name in sorted(stored.keys() - wanted.keys())
        if not (IGNORABLE_WEIGHTS.search(name) or (tie_word_embeddings and name == HEAD_WEIGHT))
    ]
    present = sorted(wanted.keys() & stored.keys())
    misshapen = [
        f"{name} (got {list(stored[name].shape)}, wanted {list(wanted[name].shape)})"
        for name in present
        if stored[name].shape != wanted[name].shape
    ]
    unreadable = [
        f"{name} ({stored[name].dtype})"
        for name in present
        if stored[name].dtype not in READABLE_DTYPES
    ]
    problems = {
        "missing": sorted(wanted.keys() - stored.keys()),
        "unexpected": unexpected,
        "of the wrong shape": misshapen,
        f"not of a dtype in {', '.join(READABLE_DTYPES)}": unreadable,
    }
    parts = [_describe(label, names) for label, names in problems.items() if names]
    if parts:
        raise WeightMismatchError(
            f"{where}: the weights do not fit config.json. {' '.join(parts)} "
            "Use config.json and weights of the same release."
        )


def _describe(label: str, names: Sequence[str]) -> str:
    listed = ", ".join(names[:MAX_LISTED])
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {label}: {listed}{rest}."
