"""Which layers of a hybrid model have a state in place of attention, and its dtype."""

from collections.abc import Mapping, Sequence

from models.errors import ModelConfigError

STATE_DTYPES = ("float32", "bfloat16", "float16")


def read_has_state(
    hf_config: Mapping[str, object],
    by_rule: Sequence[bool],
    *names: str,
    field: str = "layer_types",
    others: Sequence[str] = ("full_attention", "attention"),
) -> tuple[bool, ...]:
    """For each layer, whether it has a state in place of attention.

    Args:
        by_rule: The result if config.json has no such field.
        names: What the field calls layers with a state.
        others: What the field calls other layers.

    Raises:
        ModelConfigError: The field is not a list with a known name for each layer.
    """
    written = hf_config.get(field)
    if written is None:
        return tuple(by_rule)
    known = (*names, *others)
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


def read_state_dtype(hf_config: Mapping[str, object], field: str) -> str:
    """The dtype in which states are kept; float32 if config.json names none.

    Raises:
        ModelConfigError: The field is not the name of a dtype.
    """
    dtype = hf_config.get(field) or "float32"
    if dtype not in STATE_DTYPES:
        raise ModelConfigError(
            f"config.json: {field} is {dtype!r}; expected {', '.join(STATE_DTYPES)}."
        )
    return dtype
