"""Checks that a checkpoint holds what a model wants, and nothing else."""

import re
from collections.abc import Iterable, Mapping, Sequence

from models.errors import WeightMismatchError
from models.loading.safetensors_reader import StoredWeight
from models.weight_rule import Source

# Left in old checkpoints: constants that are computed from the config.
IGNORABLE_WEIGHTS = re.compile(r"rotary_emb\.inv_freq$|self_attn\.masked_bias$|self_attn\.bias$")
READABLE_DTYPES = ("F64", "F32", "F16", "BF16")
MAX_LISTED = 10


def check_weights(
    stored: Mapping[str, StoredWeight],
    sources: Sequence[Source],
    *,
    ignored: Iterable[str] = (),
    where: str,
) -> None:
    """Compares what a checkpoint holds with what the model wants.

    Args:
        ignored: Names of weights that may be there, besides `IGNORABLE_WEIGHTS`.
        where: Names the checkpoint in the message.

    Raises:
        WeightMismatchError: Weights are missing, unexpected, misshapen or not floating point. The
            message lists the first `MAX_LISTED` of each and counts the rest.
    """
    wanted = {source.name for source in sources}
    unexpected = [
        name
        for name in sorted(stored.keys() - wanted - set(ignored))
        if not IGNORABLE_WEIGHTS.search(name)
    ]
    present = sorted(wanted & stored.keys())
    # Several parameters may have parts of one source: each says what shape it takes it to have.
    misshapen = [
        f"{name} (got {list(stored[name].shape)}, wanted {list(shape)})"
        for name, shape in sorted({(source.name, source.shape) for source in sources})
        if name in stored and stored[name].shape != shape
    ]
    unreadable = [
        f"{name} ({stored[name].dtype})"
        for name in present
        if stored[name].dtype not in READABLE_DTYPES
    ]
    problems = {
        "missing": sorted(wanted - stored.keys()),
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
