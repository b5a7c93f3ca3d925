"""Which body runs an op: the names of the implementations, and the rule that picks one."""

from collections.abc import Mapping
from typing import Literal, TypeVar, get_args

Implementation = Literal["reference", "xla", "pallas_interpret"]
IMPLEMENTATIONS: tuple[str, ...] = get_args(Implementation)

Body = TypeVar("Body")


def select_body(op_name: str, bodies: Mapping[str, Body], implementation: str | None) -> Body:
    """Picks one of an op's bodies by name; `None` means the fastest one on this platform.

    Today that is the plain XLA body on every platform: it is the only one that is both compiled
    and fast. Every op has it. This function is where a Mosaic body becomes a platform's default.

    Raises:
        ValueError: The op has no body of this name.
    """
    if implementation is None:
        return bodies["xla"]
    if implementation not in bodies:
        raise ValueError(
            f"{op_name} has no such implementation: got {implementation!r}, "
            f"wanted None or one of {sorted(bodies)}."
        )
    return bodies[implementation]
