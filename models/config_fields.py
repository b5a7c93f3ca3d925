"""Typed reads of single fields of a config.json, with errors that name the field."""

from collections.abc import Mapping

from models.errors import ModelConfigError, UnsupportedModelError


def read_count(
    fields: Mapping[str, object], name: str, default: int | None = None, *, minimum: int = 1
) -> int:
    """Reads an integer of at least `minimum`.

    A missing or null field is `default`, or an error without one.
    """
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        wanted = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        raise _bad_field(name, value, wanted)
    return value


def read_number(fields: Mapping[str, object], name: str, default: float | None = None) -> float:
    """Reads a positive number; a missing or null field is `default`, or an error without one."""
    value = fields.get(name)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0:
        raise _bad_field(name, value, "a positive number")
    return float(value)


def read_optional_number(fields: Mapping[str, object], name: str) -> float | None:
    """Reads a positive number, or None where it is missing, null or 0, as HF reads 0."""
    return read_number(fields, name) if fields.get(name) else None


def read_flag(fields: Mapping[str, object], name: str, default: bool = False) -> bool:
    """Reads true or false; a missing or null field is `default`."""
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise _bad_field(name, value, "true or false")
    return value


def read_token_ids(fields: Mapping[str, object], name: str) -> tuple[int, ...]:
    """Reads a token id or a list of them; a missing or null field is empty."""
    value = fields.get(name)
    if value is None:
        return ()
    token_ids = value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in token_ids):
        raise _bad_field(name, value, "a token id or a list of token ids")
    return tuple(token_ids)


def with_defaults(
    fields: Mapping[str, object], defaults: Mapping[str, object]
) -> dict[str, object]:
    """The fields, with a family's defaults for missing and null ones. A null token id stays none.

    Without this, a null number would be the default of the function that reads it, which may be
    that of other families.
    """
    given = {
        name: value
        for name, value in fields.items()
        if value is not None or name not in defaults or name.endswith("_token_id")
    }
    return {**defaults, **given}


def refuse_other_values(fields: Mapping[str, object], supported: Mapping[str, object]) -> None:
    """Checks fields for which a family computes one value only.

    Args:
        supported: The value of each field. A missing or null field has it.

    Raises:
        UnsupportedModelError: A field has another value.
    """
    for name, value in supported.items():
        if fields.get(name) not in (None, value):
            raise UnsupportedModelError(
                f"config.json: {name}={fields[name]!r} is not supported for this architecture; "
                f"supported is {'to leave it out' if value is None else repr(value)}."
            )


def _bad_field(name: str, got: object, wanted: str) -> ModelConfigError:
    return ModelConfigError(
        f"config.json: {name} is {'missing' if got is None else repr(got)}; wanted {wanted}. "
        "Use the config.json that was published with the weights."
    )
