"""Objects inside a config.json, such as the settings of attention in MPT and DBRX."""

from collections.abc import Mapping

from models.errors import ModelConfigError


def read_part(hf_config: Mapping[str, object], name: str) -> Mapping[str, object]:
    """Reads an object inside a config.json; a missing one is empty.

    Raises:
        ModelConfigError: The field is not an object.
    """
    part = hf_config.get(name)
    if part is None:
        return {}
    if not isinstance(part, Mapping):
        raise ModelConfigError(f"config.json: {name} is {part!r}; expected an object.")
    return part
