"""Which layers of a hybrid model have a state in place of attention, from its config.json."""

from collections.abc import Mapping, Sequence

from models.errors import ModelConfigError


def read_has_state(
    hf_config: Mapping[str, object],
    by_rule: Sequence[bool],
    *names: str,
    field: str = "layer_types",
) -> tuple[bool, ...]:
    """For each layer, whether it has a state. All other layers have full attention.

    Args:
        by_rule: The result if config.json has no such field.
        names: What the field calls layers with a state. It calls others "full_attention", or
            "attention".

    Raises:
        ModelConfigError: The field is not a list with a known name for each layer.
    """
    written = hf_config.get(field)
    if written is None:
        return tuple(by_rule)
    known = (*names, "full_attention", "attention")
    if (
        not isinstance(written, list)
        or len(written) != len(by_rule)
        or any(name not in known for name in written)
    ):
        raise ModelConfigError(
            f"config.json: {field} is {written!r}; expected a list of {len(by_rule)} names, one "
            f"for each layer, of {', '.join(known)}."
        )
    return tuple(name in names for name in written)
