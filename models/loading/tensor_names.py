"""Finds the tensors that a model needs under the names that checkpoints give them."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable

from models.errors import WeightMismatchError
from models.loading.checkpoint import Checkpoint

# Modules around the text model, which depend on the class that saved the checkpoint: multimodal
# classes have `language_model`, base classes leave out `model`, PEFT adds `base_model`, and
# PyTorch's DDP adds `module`.
_OUTER_MODULES = ("model", "language_model", "text_model", "base_model", "module")
# PyTorch's wrappers of single modules: torch.compile, FSDP, and activation checkpointing.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))_(?:orig_mod|fsdp_wrapped_module|checkpoint_wrapped_module)\."
)


def name_weights(
    checkpoint: Checkpoint,
    wanted: Collection[str],
    *,
    of_family: Callable[[str], str] = str,
) -> None:
    """Renames the weights of a checkpoint to the names that weight rules have for them.

    Args:
        wanted: The names in the weight rules.
        of_family: As `Decoder.name_weight`.

    Raises:
        WeightMismatchError: The checkpoint has one of these tensors under several names.
    """
    matched = match_tensor_names(map(of_family, checkpoint.weights), wanted)
    names = {stored: matched[of_family(stored)] for stored in checkpoint.weights}
    by_name = defaultdict(list)
    for stored, name in names.items():
        by_name[name].append(stored)
    repeated = {name: stored for name, stored in by_name.items() if len(stored) > 1}
    if unclear := [stored for name, stored in sorted(repeated.items()) if name in wanted]:
        pairs = ", ".join(" and ".join(sorted(stored)) for stored in unclear[:5])
        raise WeightMismatchError(
            f"{checkpoint.folder}: {len(unclear)} tensors have two names, for example {pairs}; "
            "the model needs each of them once. Delete the files or tensors that are out of date."
        )
    # No rule needs these tensors, so their own names serve as well.
    names |= {own: own for stored in repeated.values() for own in stored}
    checkpoint.rename(names)


def match_tensor_names(stored: Iterable[str], wanted: Collection[str]) -> dict[str, str]:
    """Finds for each name in a checkpoint the name that weight rules have for the same tensor.

    Two names belong to the same tensor if they are equal without the outer modules at their start.
    transformers maps names in the same way. For example, "norm.weight",
    "language_model.model.norm.weight" and "model.language_model.norm.weight" are names of
    "model.norm.weight".

    Args:
        stored: The names in the checkpoint.
        wanted: The names in the weight rules, at least one.

    Returns:
        Name in the checkpoint -> name in the weight rules. A tensor that no rule needs gets the
        name that it would have there.
    """
    wanted = set(wanted)
    base = _base_of(wanted)
    modules = "|".join(map(re.escape, sorted({*_OUTER_MODULES, base})))
    outer = re.compile(rf"(?:(?:{modules})\.)*")
    matched = {}
    for name in stored:
        unwrapped = _WRAPPERS.sub("", name)
        local = unwrapped[outer.match(unwrapped).end() :]
        # The vocabulary head is outside of the base model.
        candidates = (name, unwrapped, local, f"{base}.{local}")
        matched[name] = next((c for c in candidates if c in wanted), f"{base}.{local}")
    return matched


def _base_of(wanted: Collection[str]) -> str:
    """The module that most names begin with: "model", or "transformer" in GPT-2."""
    ((base, _),) = Counter(name.partition(".")[0] for name in wanted).most_common(1)
    return base
