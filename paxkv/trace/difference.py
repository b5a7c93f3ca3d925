"""`first_difference`: finds the first place where two recorded values differ."""

import dataclasses
from collections.abc import Iterator

import msgspec


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """One value that differs from the recorded value.

    Args:
        path: Path to the value, such as `decision.running['r7'].new_block_ids[0][1]`.
    """

    path: str
    got: object
    recorded: object


def first_difference(got: object, recorded: object, path: str = "") -> Difference | None:
    """Returns the first value in `got` that differs from `recorded`; None if all are equal."""
    if got == recorded:
        return None
    for key, got_part, recorded_part in _parts(got, recorded):
        found = first_difference(got_part, recorded_part, path + key)
        if found is not None:
            return found
    return Difference(path.removeprefix("."), got, recorded)


def _parts(got: object, recorded: object) -> Iterator[tuple[str, object, object]]:
    """Yields (path, got, recorded) of each pair of parts; nothing if the structures differ."""
    if type(got) is not type(recorded):
        return
    if isinstance(got, msgspec.Struct):
        for name in got.__struct_fields__:
            yield f".{name}", getattr(got, name), getattr(recorded, name)
    elif isinstance(got, dict):
        if got.keys() == recorded.keys():
            for key in recorded:
                yield f"[{key!r}]", got[key], recorded[key]
    elif isinstance(got, (list, tuple)):
        yield from _elements(got, recorded)


def _elements(got: list, recorded: list) -> Iterator[tuple[str, object, object]]:
    """Yields the elements pairwise; None stands for an element that one list lacks."""
    for index in range(max(len(got), len(recorded))):
        got_part = got[index] if index < len(got) else None
        recorded_part = recorded[index] if index < len(recorded) else None
        # Show a request's id instead of its index.
        got_id, recorded_id = (getattr(part, "req_id", None) for part in (got_part, recorded_part))
        name = index if got_id is None or got_id != recorded_id else repr(got_id)
        yield f"[{name}]", got_part, recorded_part
